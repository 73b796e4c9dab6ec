"""Speculation options from the wire: which kinds of acceptance go with which requests and
models."""

import math
from typing import Any

import pytest

from tandem.cluster.client.options import GenerateOptions, build_request
from tandem.cluster.proto import tandem_pb2 as pb
from tandem.core.request import (
    REJECTION,
    REJECTION_GREEDY,
    RELAXED,
    RELAXED_LOG_PROBS,
    TYPICAL,
    Speculation,
)
from tests.unit.test_request_mapping import THINKER, Bytes, make, mapped, to_request


def test_the_clients_options_arrive() -> None:
    relaxed: GenerateOptions = {
        "acceptance": "relaxed_log_probs",
        "relaxed_top_n": 10,
        "relaxed_delta": 0.6,
        "max_drafts": 2,
    }
    typical: GenerateOptions = {"acceptance": "typical", "typical_alpha": 0.5, "temperature": 0.7}
    request = to_request(build_request("ab", typical), THINKER, Bytes())
    assert request.speculation == Speculation(None, TYPICAL, typical_alpha=0.5)
    request = to_request(build_request("ab", relaxed), THINKER, Bytes())
    assert request.speculation == Speculation(2, RELAXED_LOG_PROBS, 10, 0.6)
    assert mapped(build_request("ab", {})).speculation == Speculation()


@pytest.mark.parametrize(
    ("speculation", "expected"),
    [
        ({"acceptance": pb.ACCEPTANCE_REJECTION}, Speculation(None, REJECTION)),
        ({"acceptance": pb.ACCEPTANCE_REJECTION_GREEDY}, Speculation(None, REJECTION_GREEDY)),
        ({"acceptance": pb.ACCEPTANCE_RELAXED}, Speculation(None, RELAXED, 1, 0.0)),
        (
            {"acceptance": pb.ACCEPTANCE_RELAXED, "relaxed_top_n": 300, "relaxed_delta": 1.0},
            Speculation(None, RELAXED, 300, 1.0),
        ),
        (
            {"acceptance": pb.ACCEPTANCE_RELAXED_LOG_PROBS, "relaxed_delta": 100.0},
            Speculation(None, RELAXED_LOG_PROBS, 1, 100.0),
        ),
    ],
)
def test_kinds_of_acceptance_arrive(speculation: dict[str, Any], expected: Speculation) -> None:
    message = make(speculation=pb.Speculation(**speculation))
    assert to_request(message, THINKER, Bytes()).speculation == expected


def test_rejection_takes_any_temperature_relaxed_only_0() -> None:
    warm = pb.Sampling(temperature=0.7)
    rejection = pb.Speculation(acceptance=pb.ACCEPTANCE_REJECTION)
    for sampling in (warm, None):
        message = make(sampling=sampling, speculation=rejection)
        assert mapped(message).speculation.acceptance == REJECTION
    for kind in (pb.ACCEPTANCE_RELAXED, pb.ACCEPTANCE_RELAXED_LOG_PROBS):
        message = make(sampling=warm, speculation=pb.Speculation(acceptance=kind))
        with pytest.raises(
            ValueError, match=r"^sampling\.temperature=0\.7: ACCEPTANCE_REL.* use 0"
        ):
            to_request(message, THINKER, Bytes())


def test_typical_takes_any_model_and_any_temperature_but_0() -> None:
    speculation = pb.Speculation(acceptance=pb.ACCEPTANCE_TYPICAL, typical_epsilon=0.5)
    message = make(sampling=pb.Sampling(temperature=0.7), speculation=speculation)
    assert mapped(message).speculation == Speculation(None, TYPICAL, typical_epsilon=0.5)
    with pytest.raises(ValueError, match=r"^sampling\.temperature=0: ACCEPTANCE_TYPICAL .* use"):
        mapped(make(speculation=speculation))


@pytest.mark.parametrize("kind", [pb.ACCEPTANCE_RELAXED, pb.ACCEPTANCE_RELAXED_LOG_PROBS])
def test_relaxed_acceptance_needs_a_model_that_thinks(kind: int) -> None:
    message = make(speculation=pb.Speculation(acceptance=kind))
    expected = r"^speculation\.acceptance='ACCEPTANCE_RELAXED.*tiny has no think tokens.*STRICT"
    with pytest.raises(ValueError, match=expected):
        mapped(message)


@pytest.mark.parametrize(
    ("acceptance", "field", "value"),
    [
        (0, "relaxed_top_n", 2),
        (0, "relaxed_delta", 0.5),
        (2, "relaxed_top_n", 2),
        (4, "relaxed_delta", 0.5),
        (0, "relaxed_delta", math.nan),
        (1, "relaxed_top_n", -1),
        (1, "relaxed_top_n", 301),
        (1, "relaxed_delta", -0.1),
        (1, "relaxed_delta", 1.1),
        (1, "relaxed_delta", math.nan),
        (3, "relaxed_delta", 100.5),
        (0, "typical_epsilon", 0.5),
        (1, "typical_alpha", 0.5),
        (5, "typical_epsilon", 1.5),
        (5, "typical_alpha", -0.1),
        (5, "typical_alpha", math.nan),
        (5, "relaxed_top_n", 2),
    ],
)
def test_a_relaxed_bound_out_of_place_is_refused(acceptance: int, field: str, value: Any) -> None:
    speculation = pb.Speculation(acceptance=acceptance, **{field: value})
    warm = pb.Sampling(temperature=0.7) if acceptance == pb.ACCEPTANCE_TYPICAL else None
    message = make(sampling=warm, speculation=speculation)
    with pytest.raises(ValueError, match=rf"^speculation\.{field}=.* use "):
        to_request(message, THINKER, Bytes())


def test_an_unknown_kind_of_acceptance_is_refused() -> None:
    message = make()
    message.speculation.MergeFromString(b"\x10\x07")
    expected = r"^speculation\.acceptance=7: is unknown to this server; use 0 \(ACCEPTANCE_STRICT\)"
    with pytest.raises(ValueError, match=expected):
        mapped(message)
    with pytest.raises(ValueError, match=r"acceptance='lax': use one of \['strict', 'relaxed'"):
        build_request("ab", {"acceptance": "lax"})


@pytest.mark.parametrize("num_drafts", [-1, 4])
def test_more_drafts_than_the_server_has_are_refused(num_drafts: int) -> None:
    with pytest.raises(ValueError, match="speculation.max_drafts=.*0 to 3"):
        mapped(make(speculation=pb.Speculation(max_drafts=num_drafts)))
