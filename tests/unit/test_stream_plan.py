"""Continuation of a client's stream after failures (cluster/client/stream.py)."""

from types import SimpleNamespace

import grpc
import pytest

from tandem.cluster.client import stream
from tandem.cluster.client.stream import InferenceError, StreamPlan
from tandem.cluster.proto import tandem_pb2 as pb

RETRY_S, BACKOFF_S = 10.0, 0.1


def failed() -> InferenceError:
    return InferenceError(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")


def token(model: str = "", proof: str = "") -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=pb.Delta(token_ids=[5]), model=model, proof=proof)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Yield the clock that plans read; tests set its only element."""
    now = [1000.0]
    monkeypatch.setattr(stream, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_time_to_retry_counts_from_the_last_token(now: list[float]) -> None:
    plan = StreamPlan("text", {}, retry_s=RETRY_S, backoff_s=BACKOFF_S)
    for _ in range(3):
        assert plan.pause_after(failed()) <= BACKOFF_S
        now[0] += 0.9 * RETRY_S
        assert 0 < plan.pause_after(failed()) <= 2 * BACKOFF_S
        plan.receive(token())
    plan.pause_after(failed())
    now[0] += RETRY_S
    with pytest.raises(InferenceError) as raised:
        plan.pause_after(failed())
    assert raised.value.token_ids == (5, 5, 5)


def test_a_resume_names_the_model_and_the_proof_that_came_first(now: list[float]) -> None:
    """Servers send them in the first message of a stream and not in others."""
    plan = StreamPlan("text", {}, retry_s=RETRY_S, backoff_s=BACKOFF_S)
    plan.receive(token(model="digest", proof="signed"))
    plan.receive(token())
    assert (plan._message.resume_model, plan._message.resume_proof) == ("digest", "signed")
    now[0] += 1.0
    plan.pause_after(failed())
    now[0] += RETRY_S
    with pytest.raises(InferenceError) as raised:
        plan.pause_after(failed())
    assert (raised.value.model, raised.value.proof) == ("digest", "signed")
