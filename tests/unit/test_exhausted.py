"""If a node runs out of memory, threads, files, disk or object store, clients are invited to
retry."""

import errno
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectStoreFullError,
    OutOfDiskError,
)

from tandem.cluster.control.actors import RayControl
from tandem.cluster.entrypoints.status_codes import status_of
from tandem.core.control import Service
from tandem.core.errors import Overloaded, RankDied, RankLost, TandemError
from tandem.core.schema import Failure, decode

WANT = [
    MemoryError(),
    OSError(errno.EMFILE, "too many open files"),
    OSError(errno.ENOSPC, "no space left on device"),
    RuntimeError("can't start new thread"),
]


@pytest.mark.parametrize("error", WANT, ids=repr)
async def test_want_of_a_node_is_told_as_overload(error: Exception) -> None:
    async def fail(_: None) -> None:
        raise error

    service = Service("decode-0", 5, {"do": (None, fail)})
    with pytest.raises(Overloaded) as told:
        decode(Failure, await service.handle(5, "do", b""))
    assert status_of(told.value).code == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_other_errors_of_a_node_stay_what_they_are() -> None:
    async def fail(_: None) -> None:
        raise OSError(errno.EPIPE, "broken pipe")

    with pytest.raises(TandemError, match="broken pipe") as told:
        decode(Failure, await Service("decode-0", 5, {"do": (None, fail)}).handle(5, "do", b""))
    assert not isinstance(told.value, Overloaded)


def control(error: Exception) -> RayControl:
    def remote(*_: Any) -> None:
        raise error

    made = RayControl("decode-0.5.0", 5)
    made._actor = SimpleNamespace(call=SimpleNamespace(remote=remote))
    return made


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ObjectStoreFullError("full"), Overloaded),
        (OutOfDiskError("full"), Overloaded),
        (ActorDiedError(), RankDied),
        (ActorUnavailableError("away", None), RankLost),
    ],
    ids=lambda x: getattr(x, "__name__", type(x).__name__),
)
async def test_what_ray_says_of_a_call(error: Exception, kind: type[TandemError]) -> None:
    with pytest.raises(TandemError) as told:
        await control(error).call("grant", b"")
    assert type(told.value) is kind
