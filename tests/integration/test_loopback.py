"""Channels inside one process."""

import threading
from concurrent.futures import Future

import pytest
import torch

from tandem.core.errors import HandoverError
from tandem.kv_transfer.base import Channel
from tests.faulty import watched
from tests.integration.test_channel import ended, threads
from tests.loopback import LoopbackChannels
from tests.waiting import PATIENCE_S, wait_until


def loopback_pair(timeout_s: float = PATIENCE_S) -> tuple[Channel, Channel]:
    channel_factory = LoopbackChannels(timeout_s)
    accepted: Future[Channel] = Future()
    threading.Thread(target=lambda: accepted.set_result(channel_factory.accept("n", "d"))).start()
    connected = channel_factory.connect(channel_factory.listen(), "n", "p")
    channel_factory.close()
    return accepted.result(PATIENCE_S), connected


def test_loopback_copies_in_order() -> None:
    sender, receiver = loopback_pair()
    targets = [torch.zeros(4), torch.zeros(4)]
    receives = [receiver.recv(target) for target in targets]
    sends = [sender.send(torch.full((4,), float(i))) for i in (1, 2)]
    for transfer in receives + sends:
        transfer.done.result(PATIENCE_S)
    assert [target.tolist() for target in targets] == [[1.0] * 4, [2.0] * 4]
    sender.abort("closed")
    receiver.abort("closed")
    ended(sender)
    ended(receiver)
    assert threads() == []


@pytest.mark.parametrize("end", ["abort", "deadline", "wrong size"])
def test_loopback_errors_destroy_both_ends(end: str) -> None:
    sender, receiver = loopback_pair(0.3 if end == "deadline" else PATIENCE_S)
    begun = watched(receiver)
    transfer = receiver.recv(torch.zeros(4))
    wait_until(lambda: bool(begun))
    if end == "abort":
        sender.abort("enough")
    elif end == "wrong size":
        sent = sender.send(torch.zeros(5))
        with pytest.raises(HandoverError, match="20 B to send, 16 to receive"):
            sent.done.result(PATIENCE_S)
    with pytest.raises(HandoverError, match=r"recv of 16 B \(transfer 0\) failed"):
        transfer.done.result(PATIENCE_S)
    sender.abort()
    ended(sender)
    ended(receiver)
    assert threads() == []
