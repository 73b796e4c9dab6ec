"""The proof that an answer was started: when it is valid, and where it must not be visible."""

import hmac
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.client.stream import InferenceError
from tandem.cluster.gateway.checks import check_request
from tandem.cluster.gateway.proofs import MAX_AGE_S, with_proof
from tandem.core.info import ModelInfo
from tandem.core.membership import Membership
from tandem.core.request import RawRequest, Request, SamplingParams, Speculation, TokenBias
from tandem.core.schema import pack
from tests.unit.test_request_mapping import MODEL, Bytes

KEY, OTHER_KEY = b"k" * 32, b"l" * 32
ASKED = RawRequest(
    prompt=(5, 6, 7),
    request_id="r",
    sampling=SamplingParams(temperature=0.5, seed=4, max_tokens=9),
    resume_token_ids=(8,),
)
Change = Callable[[RawRequest], RawRequest]


def admitted(asked: RawRequest, key: bytes = KEY, model: ModelInfo = MODEL) -> tuple[Request, str]:
    tokenizer: Any = Bytes()
    request = check_request(asked, model, tokenizer)
    return with_proof(request, asked.resume_proof, key, model.digest)


def proven(asked: RawRequest = ASKED) -> RawRequest:
    """Return ``asked`` with the proof from its first stream."""
    _, proof = admitted(replace(asked, resume_token_ids=()))
    return replace(asked, resume_proof=proof)


def with_sampling(**changes: Any) -> Change:
    return lambda asked: replace(asked, sampling=replace(asked.sampling, **changes))


def test_a_resume_with_the_proof_of_its_first_stream_has_begun() -> None:
    request, proof = admitted(proven())
    assert request.is_resumed and request.output_ids == (8,)
    assert proof == proven().resume_proof, "its age counts from the first stream"
    longer = replace(proven(), resume_token_ids=(8, 9, 9))
    assert admitted(longer)[0].is_resumed


def test_text_and_its_tokens_are_the_same_request() -> None:
    as_text = replace(ASKED, prompt="abc")
    request, _ = admitted(as_text)
    as_ids = replace(proven(as_text), prompt=request.prompt_ids)
    assert admitted(as_ids)[0].is_resumed


@pytest.mark.parametrize(
    "change",
    [
        lambda asked: replace(asked, resume_proof=""),
        lambda asked: replace(asked, resume_token_ids=()),
        lambda asked: replace(asked, request_id="s"),
        lambda asked: replace(asked, prompt=(5, 6, 8)),
        lambda asked: replace(asked, prompt=(5, 6)),
        lambda asked: replace(asked, prompt=(5, 6), resume_token_ids=(7, 8)),
        with_sampling(seed=5),
        with_sampling(seed=None),
        with_sampling(temperature=0.6),
        with_sampling(max_tokens=10),
        with_sampling(stop=("a",)),
        with_sampling(logit_bias=(TokenBias(4, 1.0),)),
        lambda asked: replace(asked, speculation=Speculation(max_drafts=1)),
    ],
)
def test_any_other_request_is_a_fresh_one_with_a_proof_of_its_own(change: Change) -> None:
    changed = change(proven())
    request, proof = admitted(changed)
    assert not request.is_resumed
    assert proof != changed.resume_proof or not changed.resume_token_ids
    again = replace(changed, resume_token_ids=(8,), resume_proof=proof)
    assert admitted(again)[0].is_resumed


def test_a_proof_of_another_model_or_cluster_does_not_count() -> None:
    other_model = replace(MODEL, digest="other")
    assert not admitted(proven(), model=other_model)[0].is_resumed
    assert not admitted(proven(), key=OTHER_KEY)[0].is_resumed


def test_without_a_key_there_are_no_proofs() -> None:
    """HMAC accepts an empty key, with which any client could sign."""
    assert admitted(ASKED, key=b"")[1] == ""
    request = replace(admitted(ASKED)[0], output_ids=())
    now = int(time.time())
    prompt = array("I", request.prompt_ids).tobytes()
    options = pack(replace(request, prompt_ids=()))
    text = f"{now} {MODEL.digest} {len(prompt)} ".encode() + prompt + options
    forged = f"{now}.{hmac.digest(b'', text, 'sha256').hex()}"
    genuine = f"{now}.{hmac.digest(KEY, text, 'sha256').hex()}"
    assert not admitted(replace(ASKED, resume_proof=forged), key=b"")[0].is_resumed
    assert admitted(replace(ASKED, resume_proof=genuine))[0].is_resumed, "the forged one is none"


@pytest.mark.parametrize(
    ("age_s", "is_valid"),
    [
        (0, True),
        (MAX_AGE_S - 2, True),
        (MAX_AGE_S + 1, False),
        (-60, True),
        (-MAX_AGE_S - 2, False),
    ],
)
def test_a_proof_expires(age_s: float, is_valid: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is slow by a minute does not invalidate the proof."""
    asked = proven()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + age_s)
    request, proof = admitted(asked)
    assert request.is_resumed == is_valid
    assert (proof == asked.resume_proof) == is_valid


@given(st.text(max_size=90) | st.from_regex(r"\d{1,20}\.[0-9a-f]{60,70}"))
def test_whatever_a_client_sends_is_no_proof_and_no_error(text: str) -> None:
    request, proof = admitted(replace(ASKED, resume_proof=text))
    assert not request.is_resumed and proof


@given(st.data())
def test_no_character_of_a_proof_can_be_changed(data: st.DataObject) -> None:
    proof = proven().resume_proof
    place = data.draw(st.integers(0, len(proof) - 1))
    other = data.draw(st.sampled_from("0123456789abcdef.").filter(lambda c: c != proof[place]))
    forged = proof[:place] + other + proof[place + 1 :]
    assert not admitted(replace(ASKED, resume_proof=forged))[0].is_resumed


def test_neither_key_nor_proof_is_in_a_representation() -> None:
    proof = proven().resume_proof
    failure = InferenceError(grpc.StatusCode.UNAVAILABLE, "gone", proof=proof)
    for shown in (proven(), failure, Membership((1, 1), proof_key=KEY), admitted(proven())[0]):
        assert proof not in f"{shown} {shown!r}"
        assert KEY.decode() not in repr(shown)
