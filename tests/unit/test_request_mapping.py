"""Requests from the wire: valid ones are accepted, wrong or unknown fields are rejected."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from tandem.cluster.client.options import GenerateOptions, build_request
from tandem.cluster.entrypoints.request_mapping import to_raw_request
from tandem.cluster.gateway.answer import Answer
from tandem.cluster.gateway.checks import check_request, field_bounds
from tandem.cluster.proto import tandem_pb2 as pb
from tandem.cluster.proto.mapping import (
    from_proto,
    piece_from_proto,
    piece_to_proto,
    to_proto,
)
from tandem.core.answer import (
    Delta,
    Finished,
    SpeculationCounts,
    Timings,
    TokenLogprobs,
    TransferStats,
    Usage,
)
from tandem.core.config import TINY_MODEL
from tandem.core.errors import ModelMismatch
from tandem.core.info import ModelInfo, RankStatus, ServerStatus
from tandem.core.request import RawRequest, Request, SamplingParams, Speculation, TokenBias
from tandem.text.tokenizer import TextStream, Tokenizer

MODEL = ModelInfo("tiny", "DeepseekV3ForCausalLM", 32, 300, (2,), 3, True, "float32")
THINKER = replace(MODEL, think_token_ids=(8, 9))


class Bytes:
    """A tokenizer with one token for each byte. ``max_token_bytes`` is the bound that it
    declares."""

    special_tokens: dict[str, int] = {}

    def __init__(self, max_token_bytes: int | None = None) -> None:
        self.max_token_bytes = max_token_bytes

    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        return [1, *(byte + 3 for byte in text.encode())]


def make(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**({"text": "ab"} | fields))


def to_request(message: pb.GenerateRequest, model: ModelInfo, tokenizer: Any) -> Request:
    return check_request(to_raw_request(message), model, tokenizer)


def mapped(message: pb.GenerateRequest) -> Request:
    return to_request(message, MODEL, Bytes())


def test_an_empty_request_gets_the_defaults() -> None:
    request = mapped(make())
    assert request == Request(request.request_id, (1, 100, 101))
    assert len(request.request_id) == 32
    assert mapped(make()).request_id != request.request_id


def test_every_implemented_field_arrives() -> None:
    sampling = pb.Sampling(
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        seed=2**63 - 1,
        stop_token_ids=[7, 8],
        max_tokens=9,
        ignore_eos=True,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={9: -2.0, 3: 1.0},
        min_tokens=4,
        stop=["b", "a"],
        logprobs=0,
        n=1,
    )
    message = pb.GenerateRequest(
        request_id="a-1",
        token_ids=pb.TokenIds(ids=[0, 299]),
        sampling=sampling,
        speculation=pb.Speculation(max_drafts=0),
        resume_token_ids=[5, 6],
    )
    request = mapped(message)
    assert (request.request_id, request.prompt_ids, request.output_ids) == ("a-1", (0, 299), (5, 6))
    got = request.sampling
    assert (got.temperature, got.top_k, got.top_p, got.min_p) == (0.7, 5, 0.9, 0.1)
    assert (got.seed, got.stop_token_ids, got.max_tokens) == (2**63 - 1, (7, 8), 9)
    assert got.ignore_eos and request.speculation.max_drafts == 0
    penalties = (got.repetition_penalty, got.presence_penalty, got.frequency_penalty)
    assert (penalties, got.min_tokens) == ((1.5, -0.5, 0.25), 4)
    assert (got.stop, got.logprobs) == (("b", "a"), 0)
    assert got.logit_bias == (TokenBias(3, 1.0), TokenBias(9, -2.0))


def test_the_clients_options_arrive() -> None:
    options: GenerateOptions = {
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {7: 1.5},
        "stop": ("x",),
        "min_tokens": 2,
        "logprobs": 3,
    }
    got = mapped(build_request("ab", options)).sampling
    assert got == SamplingParams(
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias=(TokenBias(7, 1.5),),
        stop=("x",),
        min_tokens=2,
        logprobs=3,
    )
    assert mapped(build_request("ab", {})).sampling == SamplingParams()


def test_a_stop_string_alone_is_one_stop_string() -> None:
    """A single stop string stays one string; protobuf would read a str as one for each
    character."""
    assert mapped(build_request("ab", {"stop": "###"})).sampling.stop == ("###",)
    assert mapped(build_request("ab", {"stop": ["#", "\n"]})).sampling.stop == ("#", "\n")


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("name", ["prompt", "stop", "stop_token_ids", "resume_token_ids"])
def test_bytes_are_neither_text_nor_token_ids(name: str, kind: type) -> None:
    """Bytes are refused as text and as token ids, because their values are not the token ids of the
    text."""
    values: dict[str, Any] = {"prompt": "ab", name: kind(b"hello")}
    with pytest.raises(ValueError, match=rf"^{name}: is of type {kind.__name__}; use a str, or"):
        build_request(values.pop("prompt"), values)  # type: ignore[arg-type]


def test_only_a_single_answer_can_be_resumed() -> None:
    assert mapped(make(sampling=pb.Sampling(n=3))).sampling.n == 3
    with pytest.raises(ValueError, match=r"^sampling\.n=3: .*only one answer"):
        mapped(make(sampling=pb.Sampling(n=3), resume_token_ids=[5]))


def test_defaults_spelled_out_are_accepted() -> None:
    sampling = pb.Sampling(repetition_penalty=1.0, n=1, top_p=1.0, seed=0)
    assert mapped(make(sampling=sampling)).sampling.seed == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e-9),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", 1.0),
        ("min_p", -0.1),
        ("min_p", math.nan),
        ("seed", -1),
        ("max_tokens", -1),
        ("stop_token_ids", [300]),
        ("stop", ["a", ""]),
        ("stop", ["a" * 4096, "b"]),
        ("logprobs", -1),
        ("logprobs", 21),
        ("n", -1),
        ("n", 17),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 5e-324),
        ("repetition_penalty", 1e-46),
        ("repetition_penalty", 1e-38),
        ("repetition_penalty", 0.0099),
        ("repetition_penalty", 10.1),
        ("repetition_penalty", math.nan),
        ("presence_penalty", 2.5),
        ("frequency_penalty", math.nan),
        ("logit_bias", {300: 1.0}),
        ("logit_bias", {3: math.inf}),
        ("min_tokens", -1),
        ("min_tokens", 129),
    ],
)
def test_a_sampling_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^sampling\.{field}.*(use|are) "):
        mapped(make(sampling=pb.Sampling(**{field: value})))


@pytest.mark.parametrize(
    ("field", "allowed", "one_more"),
    [
        ("stop", [*"a" * 31, "b" * 4065], [*"a" * 32, ""]),
        ("stop_token_ids", [7] * 1024, [-1] * 1025),
        ("logit_bias", dict.fromkeys(range(1024), 1.0), dict.fromkeys(range(-1, 1024), math.nan)),
    ],
)
def test_lists_are_counted_before_they_are_read(field: str, allowed: Any, one_more: Any) -> None:
    model = replace(MODEL, vocab_size=2000)
    request = to_request(make(sampling=pb.Sampling(**{field: allowed})), model, Bytes())
    assert len(getattr(request.sampling, field)) == len(allowed)
    count = len(one_more)
    with pytest.raises(ValueError, match=rf"^len\(sampling\.{field}\)={count}: use at most"):
        to_request(make(sampling=pb.Sampling(**{field: one_more})), model, Bytes())


def test_a_vocabulary_of_ends_leaves_no_token_before_min_tokens() -> None:
    """min_tokens is refused if every token would end the answer. EOS is one of the ends unless it
    is ignored. Resumed tokens count."""
    ends = [*range(MODEL.eos_token_ids[0]), *range(MODEL.eos_token_ids[0] + 1, MODEL.vocab_size)]
    sampling = pb.Sampling(stop_token_ids=ends, min_tokens=2)
    with pytest.raises(
        ValueError, match=r"^sampling\.min_tokens=2: .* cover the vocabulary.*use 0"
    ):
        mapped(make(sampling=sampling))
    mapped(make(sampling=sampling, resume_token_ids=[5, 6]))
    mapped(make(sampling=pb.Sampling(stop_token_ids=ends)))
    mapped(make(sampling=pb.Sampling(stop_token_ids=ends, min_tokens=2, ignore_eos=True)))
    mapped(make(sampling=pb.Sampling(stop_token_ids=ends[1:], min_tokens=2)))


class Untouched(Bytes):
    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        raise AssertionError("it was tokenised")


def test_what_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    """31 tokens of up to 4 bytes hold 124 bytes. Such a text might fit, a longer one cannot."""
    with pytest.raises(
        ValueError, match=r"^text: the prompt has 125 bytes, but .* have at most 124;"
    ):
        to_request(make(text="é" * 62 + "x"), MODEL, Untouched(4))
    with pytest.raises(AssertionError, match="it was tokenised"):
        to_request(make(text="é" * 62), MODEL, Untouched(4))
    with pytest.raises(ValueError, match="text: the prompt has 126 tokens"):
        to_request(make(text="é" * 62 + "x"), MODEL, Bytes(None))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (pb.GenerateRequest(), "no prompt"),
        (make(text=""), "the prompt is empty"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), "no tokens"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[4, -1])), r"token_ids\[1\]=-1: .* 0 to 299"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5] * 32)), "32 tokens; use at most 31"),
        (make(text="x" * 40), "text: the prompt has 41 tokens"),
        (make(request_id="a b"), "request_id='a b'"),
        (make(request_id="x" * 129), "request_id="),
        (make(resume_token_ids=[300]), r"resume_token_ids\[0\]=300"),
        (make(resume_token_ids=[300] * 32), r"len\(resume_token_ids\)=32: .* at most 31"),
        (make(token_ids=pb.TokenIds(ids=[-1] * 32)), "32 tokens; use at most 31"),
    ],
)
def test_a_wrong_prompt_name_or_resume_is_refused(
    message: pb.GenerateRequest, expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        mapped(message)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"sampling": SamplingParams(top_p=1.5)}, r"sampling\.top_p=1\.5: use a number above 0"),
        ({"sampling": SamplingParams(stop=("x",) * 33)}, r"len\(sampling\.stop\)=33: use at most"),
        ({"speculation": Speculation(acceptance="lax")}, r"speculation\.acceptance='lax': use one"),
        ({"prompt": None}, "no prompt"),
        ({"request_id": "a\tb"}, r"request_id='a\\tb': use 1 to 128"),
    ],
)
def test_what_comes_through_no_message_is_checked_alike(
    asked: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        check_request(RawRequest(**({"prompt": [5]} | asked)), MODEL, Bytes())
    request = check_request(RawRequest([5], "a"), MODEL, Bytes())
    assert request == Request("a", (5,)) == mapped(make(request_id="a", token_ids={"ids": [5]}))


def test_fields_of_a_newer_client_are_refused() -> None:
    newer = pb.GenerateRequest.FromString(make().SerializeToString() + b"\xf8\x06\x01")
    with pytest.raises(ValueError, match="field number 111 is unknown"):
        mapped(newer)
    newer.CopyFrom(make())
    newer.sampling.MergeFromString(b"\xf8\x06\x01")
    with pytest.raises(ValueError, match="sampling.field number 111"):
        mapped(newer)


def resumed(**fields: Any) -> Answer:
    request = mapped(make(**fields))
    request = replace(request, sampling=replace(request.sampling, seed=7))
    return Answer(request, TextStream(Tokenizer(TINY_MODEL)), MODEL)


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([2, 5], r"resume_token_ids\[0\]=2: ends the answer"),
        ([5] * 30, r"len\(resume_token_ids\)=30: .* at most 29"),
    ],
)
def test_what_goes_on_after_the_end_of_its_answer_is_refused(
    token_ids: list[int], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        resumed(resume_token_ids=token_ids)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"resume_token_ids": [5, 2]}, "stop"),
        ({"resume_token_ids": [5] * 29}, "length"),
        ({"resume_token_ids": [5, 5], "sampling": pb.Sampling(max_tokens=2)}, "length"),
        ({"resume_token_ids": [5, 2, 5], "sampling": pb.Sampling(ignore_eos=True)}, None),
    ],
)
def test_resumed_tokens_may_be_a_whole_answer(fields: dict[str, Any], reason: str | None) -> None:
    answer = resumed(**fields)
    assert answer.finish_reason == reason
    if reason is not None:
        finished = answer.make_finished()
        assert finished.usage == Usage(prompt=3), "resumed tokens are not counted again"
        assert (finished.finish_reason, finished.seed) == (reason, 7)


def test_every_number_of_a_request_has_bounds() -> None:
    kinds = {getattr(FieldDescriptor, f"CPPTYPE_{kind}") for kind in ("STRING", "BOOL", "ENUM")}
    table = field_bounds(RawRequest(), MODEL)
    for prefix, message in (("sampling.", pb.Sampling), ("speculation.", pb.Speculation)):
        for field in message.DESCRIPTOR.fields:
            if not field.is_repeated and field.cpp_type not in kinds:
                assert prefix + field.name in table


@pytest.mark.parametrize(
    ("noun", "message"),
    [
        (Finished, pb.Finished),
        (Usage, pb.Usage),
        (SpeculationCounts, pb.SpeculationStats),
        (Timings, pb.TimingsMs),
        (TransferStats, pb.KvTransferStats),
        (ModelInfo, pb.ModelInfo),
        (RankStatus, pb.RankStatus),
        (ServerStatus, pb.Status),
    ],
)
def test_a_noun_and_its_message_have_the_same_fields(noun: Any, message: Any) -> None:
    assert {field.name for field in fields(noun)} == set(message.DESCRIPTOR.fields_by_name)


def test_a_status_survives_the_wire() -> None:
    node = RankStatus("d-0", "decode", 1, False, max_tokens=2**62 + 1, counters={"step_s": 0.1})
    status = ServerStatus("DRAINING", "disaggregated", 3, (node, node))
    assert from_proto(ServerStatus, to_proto(pb.Status, status)) == status


def test_an_answer_of_another_model_is_refused_with_both_digests() -> None:
    model = replace(MODEL, digest="d1")
    asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), resume_token_ids=[7])
    for same in ("", "d1"):
        asked.resume_model = same
        assert check_request(to_raw_request(asked), model, Bytes()).output_ids == (7,)
    asked.resume_model = "d2" * 1000
    with pytest.raises(ModelMismatch, match=r"resume_model=(d2){32}: .* has tiny with digest d1; "):
        check_request(to_raw_request(asked), model, Bytes())


def test_the_first_message_says_which_model_answers() -> None:
    piece = Delta(0, (4,), "a")
    assert piece_to_proto(piece, "d1").model == "d1" and piece_to_proto(piece).model == ""


def test_what_a_model_is_survives_the_wire() -> None:
    for model in (MODEL, THINKER):
        assert from_proto(ModelInfo, to_proto(pb.ModelInfo, model)) == model


def test_pieces_survive_the_wire() -> None:
    logprobs = (TokenLogprobs(-0.5, (4, 9), (-0.5, -1.5)), TokenLogprobs(-3.0, (), ()))
    delta = Delta(0, (4, 5), "é", logprobs)
    assert piece_from_proto(piece_to_proto(delta)) == delta
    finished = Finished(
        index=0,
        finish_reason="error",
        usage=Usage(3, 1, 6),
        speculation=SpeculationCounts(2, 6, 3, (2, 1, 0), 1),
        timings_ms=Timings(0.5, 1.5, 2.5, 3.5, 4.5),
        kv_transfer=TransferStats(2**40, 3, "gloo", 0.25),
        seed=2**63 - 1,
        error="it broke",
    )
    again = piece_from_proto(piece_to_proto(finished))
    assert again == finished and isinstance(again, Finished)
    assert (again.text, again.token_ids) == ("", ())


def test_a_piece_of_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(ValueError, match="update the client"):
        piece_from_proto(pb.GenerateResponse())
