"""Channels between two OS processes over gloo."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch

from tandem.core.errors import HandoverError
from tandem.kv_transfer.base import Channel, Direction
from tandem.kv_transfer.channel import create_channel_factory
from tandem.kv_transfer.staging import StagingPool
from tests.faulty import watched
from tests.forks import forks
from tests.waiting import PATIENCE_S, wait_until

HOST = "127.0.0.1"
DEADLINE_S = 2.0


def sender_process(pipe: Connection) -> None:
    """Run the prefill rank P: create and use channels as ordered, until the order "stop"."""
    torch.set_num_threads(1)
    channel_factory = create_channel_factory("gloo", HOST, DEADLINE_S)
    pipe.send(channel_factory.listen())
    channel: Channel | None = None
    while (order := pipe.recv())[0] != "stop":
        if order[0] == "accept":
            channel = channel_factory.accept(order[1], "d")
        elif order[0] == "send":
            assert channel is not None
            channel.send(torch.arange(order[1], dtype=torch.int64)).done.result()
        elif order[0] == "close":
            assert channel is not None
            channel.abort("closed")
            channel.terminal.result(PATIENCE_S)
        pipe.send("done")


class Peer:
    def __init__(self) -> None:
        context = forks()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=sender_process, args=(theirs,), daemon=True)
        self.process.start()
        self.address = self.pipe.recv()
        self.channel_factory = create_channel_factory("gloo", HOST, DEADLINE_S)
        self.num_channels = 0

    def connect(self) -> Channel:
        self.num_channels += 1
        nonce = f"nonce-{self.num_channels}"
        self.pipe.send(("accept", nonce))
        channel = self.channel_factory.connect(self.address, nonce, "p")
        assert self.pipe.recv() == "done"
        return channel

    def stop(self) -> None:
        if self.process.is_alive():
            self.pipe.send(("stop",))
        self.process.join(PATIENCE_S)
        assert not self.process.is_alive(), "the sender process was left behind"


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.stop()


@pytest.fixture
def mortal() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.process.kill()
    peer.process.join(PATIENCE_S)
    assert not peer.process.is_alive()


def ended(channel: Channel) -> None:
    channel.terminal.result(PATIENCE_S)
    assert channel.failure is not None
    with pytest.raises(HandoverError):
        channel.recv(torch.zeros(1)).done.result(PATIENCE_S)


def threads() -> list[str]:
    """Return the names of channel threads that have not ended."""
    found = [t for t in threading.enumerate() if t.name.startswith("channel-")]
    for thread in found:
        thread.join(PATIENCE_S)
    return [thread.name for thread in found if thread.is_alive()]


def test_bytes_arrive_and_ids_agree(peer: Peer) -> None:
    channel = peer.connect()
    begun, num_warm = watched(channel), channel.num_transfers
    for i, num in enumerate((1, 5, 100_000)):
        target = torch.zeros(num, dtype=torch.int64)
        transfer = channel.recv(target)
        wait_until(lambda: len(begun) > i)  # noqa: B023
        peer.pipe.send(("send", num))
        transfer.done.result(PATIENCE_S)
        assert peer.pipe.recv() == "done"
        assert torch.equal(target, torch.arange(num))
    assert channel.num_transfers == num_warm + 3 and channel.failure is None
    peer.pipe.send(("close",))
    assert peer.pipe.recv() == "done"
    channel.abort("closed")
    ended(channel)
    assert threads() == []


def test_receives_that_are_posted_early_get_each_what_is_theirs(peer: Peer) -> None:
    channel = peer.connect()
    targets = [torch.zeros(num, dtype=torch.int64) for num in (100_000, 7, 50_000)]
    transfers = [channel.recv(target) for target in targets]
    for target, transfer in zip(targets, transfers, strict=True):
        peer.pipe.send(("send", len(target)))
        transfer.done.result(PATIENCE_S)
        assert peer.pipe.recv() == "done" and torch.equal(target, torch.arange(len(target)))
    channel.abort("enough")
    ended(channel)
    assert threads() == []


async def test_all_that_were_posted_fail_with_the_first_and_only_then_is_memory_free(
    mortal: Peer,
) -> None:
    channel = mortal.connect()
    pool, begun = StagingPool(3 << 20, 1 << 20), watched(channel)
    buffers = [await pool.reserve() for _ in range(3)]
    transfers = [channel.recv(buffer.bytes) for buffer in buffers]
    for buffer in buffers:
        pool.quarantine(buffer, channel.terminal)
    wait_until(lambda: bool(begun))
    assert mortal.process.pid is not None
    os.kill(mortal.process.pid, signal.SIGKILL)
    for transfer in transfers:
        with pytest.raises(HandoverError, match=r"recv of .*transfer 2\)"):
            await asyncio.wait_for(asyncio.wrap_future(transfer.done), PATIENCE_S)
    await asyncio.wait_for(asyncio.wrap_future(channel.terminal), PATIENCE_S)
    for buffer in [await asyncio.wait_for(pool.reserve(), PATIENCE_S) for _ in buffers]:
        pool.free(buffer)
    pool.check_integrity()
    ended(channel)
    assert len(begun) == 1 and threads() == []


def test_two_channels_to_one_peer_are_apart(peer: Peer) -> None:
    first, second = peer.connect(), peer.connect()
    target = torch.zeros(10, dtype=torch.int64)
    transfer = second.recv(target)
    peer.pipe.send(("send", 10))
    transfer.done.result(PATIENCE_S)
    assert peer.pipe.recv() == "done" and torch.equal(target, torch.arange(10))
    for channel in (first, second):
        channel.abort("enough")
        ended(channel)
    assert threads() == []


def test_a_receive_that_nobody_fills_ends_at_the_deadline(peer: Peer) -> None:
    channel = peer.connect()
    began = time.monotonic()
    transfer = channel.recv(torch.zeros(8))
    with pytest.raises(HandoverError, match=r"recv of 32 B \(transfer 2\) failed"):
        transfer.done.result(PATIENCE_S)
    assert time.monotonic() - began > DEADLINE_S * 0.9  # time: it ends neither before nor never
    ended(channel)


def test_the_peers_closing_ends_a_receive_at_once(peer: Peer) -> None:
    channel = peer.connect()
    begun = watched(channel)
    transfer = channel.recv(torch.zeros(8))
    wait_until(lambda: bool(begun))
    peer.pipe.send(("close",))
    with pytest.raises(HandoverError) as caught:
        transfer.done.result(PATIENCE_S)
    assert "Timed out" not in str(caught.value), caught.value
    assert peer.pipe.recv() == "done"
    ended(channel)


async def test_death_of_the_peer_returns_the_staging_it_might_write(mortal: Peer) -> None:
    channel = mortal.connect()
    pool = StagingPool(1 << 20, 1 << 20)
    buffer, begun = await pool.reserve(), watched(channel)
    transfer = channel.recv(buffer.bytes)
    wait_until(lambda: bool(begun))
    pool.quarantine(buffer, channel.terminal)
    assert pool.num_buffers - pool.num_taken == 0
    assert mortal.process.pid is not None
    os.kill(mortal.process.pid, signal.SIGKILL)
    with pytest.raises(HandoverError):
        await asyncio.wait_for(asyncio.wrap_future(transfer.done), PATIENCE_S)
    pool.free(await asyncio.wait_for(pool.reserve(), PATIENCE_S))
    pool.check_integrity()
    ended(channel)
    assert pool.num_buffers - pool.num_taken == 1 and threads() == []


def test_a_frozen_peer_is_given_up_at_the_deadline(mortal: Peer) -> None:
    channel = mortal.connect()
    assert mortal.process.pid is not None
    os.kill(mortal.process.pid, signal.SIGSTOP)
    transfer = channel.recv(torch.zeros(8))
    channel.abort("the pull was given up")
    assert not channel.terminal.done(), "gloo still holds the tensor"
    with pytest.raises(HandoverError):
        transfer.done.result(PATIENCE_S)
    ended(channel)
    os.kill(mortal.process.pid, signal.SIGCONT)


class Deaf:
    """A transport whose transfer completes successfully after it was aborted."""

    def __init__(self) -> None:
        self.has_arrived = threading.Event()
        self.is_destroyed = False

    def post(self, direction: Direction, tensor: torch.Tensor, transfer_id: int) -> None:
        pass

    def wait(self, posted: None, timeout_s: float) -> None:
        assert self.has_arrived.wait(timeout_s)

    def abort(self) -> None:
        pass

    def destroy(self) -> None:
        self.is_destroyed = True


def test_memory_comes_free_also_when_a_transfer_ends_well_after_its_channel() -> None:
    transport = Deaf()
    channel = Channel(transport, "p", PATIENCE_S)
    begun = watched(channel)
    transfer = channel.recv(torch.zeros(1))
    wait_until(lambda: bool(begun))
    channel.abort("its hand-over was cancelled")
    transport.has_arrived.set()
    channel.terminal.result(PATIENCE_S)
    with pytest.raises(HandoverError, match="cancelled"):
        transfer.done.result()
    assert transport.is_destroyed and threads() == []


def test_nobody_at_the_rendezvous_is_a_named_error() -> None:
    channel_factory = create_channel_factory("gloo", HOST, timeout_s=0.5)  # time: its deadline
    address = channel_factory.listen()
    with pytest.raises(HandoverError, match=r"channel gloo:p could not be opened at 127\.0\.0\.1"):
        channel_factory.connect(address, "nobody", "p")
    assert threads() == []


def test_the_rendezvous_listens_on_its_address_only() -> None:
    channel_factory = create_channel_factory("gloo", HOST)
    port = int(channel_factory.listen().rsplit(":", 1)[1])
    listening = []
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(path) as table:
            rows = [line.split() for line in table.readlines()[1:]]
        listening += [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")]
    assert listening == [f"0100007F:{port:04X}"]


def test_wrong_settings_are_the_users_mistake() -> None:
    with pytest.raises(ValueError, match="kv_transfer.backend"):
        create_channel_factory("mpi", HOST)
    with pytest.raises(ValueError, match="cannot listen"):
        create_channel_factory("gloo", "192.0.2.1").listen()
