"""The channel's use of NCCL, with a stand-in for its process group that needs no GPU."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tandem.core.errors import HandoverError
from tandem.kv_transfer import nccl
from tandem.kv_transfer.base import Channel
from tandem.kv_transfer.nccl import NcclBackend, NcclTransport
from tandem.net.nccl import NCCL_SETTINGS, find_interface
from tests.waiting import PATIENCE_S, wait_until


class Event:
    """An event on the stand-in's only stream. It passes with the transfer that was running at its
    record."""

    group: "Group"

    def record(self, stream: object) -> None:
        self.number = Event.group.num_posted

    def query(self) -> bool:
        Event.group.num_looks += 1
        return Event.group.num_passed >= self.number


class Group:
    """A process group of which ``num_passed`` of ``num_posted`` transfers are over on the
    device."""

    def __init__(self, *made_of: Any) -> None:
        self.options = made_of[-1] if made_of else None
        self.environment = dict(os.environ)
        self.num_posted = self.num_passed = self.num_aborts = self.num_looks = 0
        self.error: Exception | None = None
        self.frees_on_abort = True
        self.abort_error: Exception | None = None
        self.aborted_on: set[threading.Thread] = set()
        Event.group = self

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> "Work":
        self.num_posted += 1
        return Work(self, self.num_posted)

    send = recv

    def looked_at(self) -> None:
        """Wait until the transfer was polled three more times."""
        last = self.num_looks + 3
        wait_until(lambda: self.num_looks >= last)

    def abort(self) -> None:
        self.num_aborts += 1
        self.aborted_on.add(threading.current_thread())
        if self.abort_error is not None:
            raise self.abort_error
        if self.frees_on_abort:
            self.num_passed = self.num_posted


class Work:
    def __init__(self, group: Group, number: int) -> None:
        self._group, self._number = group, number

    def is_completed(self) -> bool:
        return self._group.error is not None or self._group.num_passed >= self._number

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return at once, whether or not the transfer is over, as NCCL's work does."""
        assert timeout is None
        if self._group.error is not None:
            raise self._group.error


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    cuda = SimpleNamespace(
        Stream=lambda device, priority: priority,
        stream=lambda _: contextlib.nullcontext(),
        Event=Event,
    )
    monkeypatch.setattr(nccl.torch, "cuda", cuda)
    for name in (*NCCL_SETTINGS, "NCCL_SOCKET_IFNAME", "TORCH_DISTRIBUTED_DEBUG"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    yield
    left = [t for t in threading.enumerate() if t.name.startswith("channel-")]
    for thread in left:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in left)


def channel(timeout_s: float = PATIENCE_S) -> tuple[Channel, Group]:
    group = Group()
    return Channel(NcclTransport(group, 1, "cuda"), "nccl:p", timeout_s), group


def test_a_transfer_is_done_once_the_device_is_and_not_before() -> None:
    """work.wait() blocks a stream and not the host, so it must not set ``done``."""
    made, group = channel()
    transfer = made.recv(torch.zeros(8))
    group.looked_at()
    assert not transfer.done.done(), "NCCL still writes into the tensor"
    group.num_passed = 1
    transfer.done.result(PATIENCE_S)
    made.abort()
    made.terminal.result(PATIENCE_S)
    assert group.num_aborts, "communicator and watchdog are left"


def test_the_deadline_is_ours_and_memory_is_free_only_once_the_kernel_is_gone() -> None:
    made, group = channel(timeout_s=0.2)  # time: the deadline
    group.frees_on_abort = False
    transfer = made.recv(torch.zeros(8))
    with pytest.raises(HandoverError, match="not done within 0.2 s"):
        transfer.done.result(PATIENCE_S)
    wait_until(lambda: group.num_aborts)
    group.looked_at()
    assert not made.terminal.done(), "the kernel still runs"
    group.num_passed = 1
    made.terminal.result(PATIENCE_S)


def test_an_error_of_the_communicator_is_told_before_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl, "SETTLE_S", 0.05)
    made, group = channel(timeout_s=60)
    transfer = made.recv(torch.zeros(8))
    group.looked_at()
    group.error = RuntimeError("remote process exited")
    with pytest.raises(HandoverError, match="remote process exited"):
        transfer.done.result(PATIENCE_S)
    made.terminal.result(PATIENCE_S)


def test_abort_runs_on_a_thread_and_what_it_ends_is_no_success() -> None:
    made, group = channel()
    transfer = made.recv(torch.zeros(8))
    group.looked_at()
    made.abort("the pull was given up")
    with pytest.raises(HandoverError, match="the pull was given up"):
        transfer.done.result(PATIENCE_S)
    made.terminal.result(PATIENCE_S)
    assert group.aborted_on and threading.current_thread() not in group.aborted_on


def test_a_communicator_that_is_created_after_the_abort_is_aborted_too() -> None:
    """The first transfer creates the communicator and may block in that for long."""
    made, group = channel()
    begun, creating, post = threading.Event(), threading.Event(), group.recv

    def slow(*args: Any, **named: Any) -> Any:
        begun.set()
        assert creating.wait(PATIENCE_S)
        return post(*args, **named)

    group.recv = slow  # type: ignore[method-assign]
    transfer = made.recv(torch.zeros(8))
    assert begun.wait(PATIENCE_S)
    made.abort("the deadline of set-up")
    with pytest.raises(HandoverError, match="the deadline of set-up"):
        transfer.done.result(PATIENCE_S)
    wait_until(lambda: group.num_aborts)
    assert not made.terminal.done()
    creating.set()
    made.terminal.result(PATIENCE_S)
    assert group.num_aborts > 1 and group.num_passed == 1


def test_a_failed_abort_is_logged_and_memory_waits_for_the_kernel(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, group = channel()
    group.abort_error = RuntimeError("unhandled cuda error")
    made.recv(torch.zeros(8))
    group.looked_at()
    made.abort()
    group.looked_at()
    assert not made.terminal.done()
    group.num_passed = 1
    made.terminal.result(PATIENCE_S)
    assert "abort failed" in caplog.text and "could not be destroyed" in caplog.text


def test_no_watchdog_acts_on_a_group_and_its_timeout_is_beyond_every_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Group] = []

    def group(*made_of: Any) -> Group:
        made.append(Group(*made_of))
        return made[0]

    options = SimpleNamespace(config=SimpleNamespace(max_ctas=0))
    group.Options = lambda: options  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "ProcessGroupNCCL", group, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    transport = NcclBackend("127.0.0.1").join(dist.HashStore(), 0)
    assert options.is_high_priority_stream and vars(transport)["_stream"] == -1, "as steps' streams"
    told = made[0].environment
    for name in (
        "ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT", "PROPAGATE_ERROR",
        "DESYNC_DEBUG", "BLOCKING_WAIT", "RETHROW_CUDA_ERRORS",
    ):  # fmt: skip
        assert told[f"TORCH_NCCL_{name}"] == "0", name
    assert told["NCCL_SOCKET_IFNAME"] == "=lo"
    assert options._timeout >= timedelta(hours=12)


def test_an_interface_that_the_operator_named_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=fabric0")
    NcclBackend("192.0.2.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=fabric0"


def test_an_address_of_no_interface_is_the_users_mistake() -> None:
    with pytest.raises(ValueError, match=r"kv_transfer.host='192.0.2.1'.*'lo': '127.0.0.1'"):
        NcclBackend("192.0.2.1")


def test_interfaces_are_found_by_their_addresses() -> None:
    assert find_interface("127.0.0.1") == find_interface("localhost") == "lo"
    with open("/proc/net/route") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    way_out = next((row[0] for row in rows if row[1] == "00000000"), None)
    if way_out is None:
        return  # a machine with loopback alone
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        asker.connect(("192.0.2.1", 9))  # sends nothing: the kernel picks the source address
        assert find_interface(asker.getsockname()[0]) == way_out
