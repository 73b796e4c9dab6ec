"""Weights that change under their path: gangs of real shells over files that a test changes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.cluster.control import gang_supervisor as gang_module
from tandem.cluster.control import restart_policy
from tandem.cluster.control.failure import CrashReport, is_starting
from tandem.cluster.control.gang_supervisor import EpochCounter, GangSupervisor
from tandem.cluster.control.plan import EpochLaunch, GangPlan, plan_gangs
from tandem.cluster.control.rebalance import _wait_until_ready
from tandem.cluster.control.weights import ClusterWeights
from tandem.core.config import TandemConfig, load
from tandem.core.errors import RankLost
from tandem.core.info import ModelInfo
from tandem.core.membership import DOWN, READY, STARTING, RankInfo, RankSpec, RankState, Rendezvous
from tandem.core.progress import LOADING
from tandem.core.schema import pack, unpack
from tandem.runtime import rank_actor
from tandem.runtime.engine_loop import EngineLoop
from tandem.runtime.rank_actor import RankActor
from tests.waiting import until

OLD, NEW = "0ld", "2ew"
MODEL = ModelInfo("tiny", "deepseek_v3", 9, 9, (1,), 3, True, "float32")


@dataclass
class Disk:
    """Files that all ranks share.

    Attributes:
        weights: Digest of the files under the path, "" if there are none.
        loaded: Digests that ranks have loaded, in order.
        num_looks: Number of times that ranks have read the digest.
        may_load: Event that ranks wait for before they read it.
    """

    weights: str = OLD
    loaded: list[str] = field(default_factory=list)
    num_looks: int = 0
    may_load: asyncio.Event = field(default_factory=asyncio.Event)


class DiskShell(RankActor):
    disk: Disk

    async def load(self, spec: RankSpec, config: TandemConfig) -> Any:
        await self.disk.may_load.wait()
        self.disk.num_looks += 1
        if not (found := self.disk.weights):
            raise ValueError("model.path: no such folder")
        self._check_weights(found)
        self.disk.loaded.append(found)

    async def start_epoch(self, spec: RankSpec, memory: Any, rendezvous: Rendezvous | None) -> Any:
        async def stop() -> None:
            pass

        info = RankInfo(spec, ("f",), "none", MODEL, 9, 9)
        return SimpleNamespace(info=info, loop=EngineLoop("none"), stop=stop, num_sequences=0)


class ShellRank:
    """A rank's shell with the interface of ``RayRank``."""

    def __init__(self, spec: RankSpec, config: TandemConfig, disk: Disk) -> None:
        self.name = spec.process_name
        self.shell = DiskShell(pack(spec), config.model_dump_json())
        self.shell.disk = disk
        self.is_killed = False

    async def get_state(self, *args: Any) -> RankState:
        if self.is_killed:
            raise RankLost(f"{self.name} was killed")
        return unpack(RankState, await self.shell.get_state(*args))

    async def open_rendezvous(self) -> Rendezvous:
        await self.shell.leave()
        return Rendezvous("h", 1, 2, b"token")

    async def join(self, spec: RankSpec, rendezvous: Rendezvous) -> None:
        await self.shell.join(pack(spec), pack(rendezvous))

    async def leave(self) -> None:
        await self.shell.leave()

    async def stop(self) -> None:
        pass

    def kill(self) -> None:
        self.is_killed = True
        if self.shell._loading is not None:
            self.shell._loading.cancel()


@dataclass
class ShellMachines:
    """Starts shells. ``ranks`` holds the latest shell of each gang and rank."""

    disk: Disk
    ranks: dict[tuple[str, int], ShellRank] = field(default_factory=dict)
    num_begun: int = 0

    async def launch_ranks(
        self, plan: GangPlan, launch: EpochLaunch, config: TandemConfig, ranks: dict[int, Any]
    ) -> None:
        specs = plan.specs(
            launch.epoch, ["127.0.0.1"] * plan.num_ranks, launch.placement_group_epoch
        )
        for rank in launch.missing:
            self.num_begun += 1
            ranks[rank] = self.ranks[plan.name, rank] = ShellRank(specs[rank], config, self.disk)

    async def read_crash_report(self, state: RankState) -> CrashReport:
        return CrashReport()

    async def release_placement_group(self, gang: str) -> None:
        pass


@dataclass
class Cluster:
    disk: Disk
    machines: ShellMachines
    weights: ClusterWeights
    supervisors: dict[str, GangSupervisor]

    @property
    def states(self) -> dict[str, str]:
        return {name: supervisor.gang.state for name, supervisor in self.supervisors.items()}

    async def ready(self) -> None:
        await until(lambda: set(self.states.values()) == {READY})

    async def waits(self, gang: str) -> None:
        """Wait until a rank of the gang reports why it does not load, and has polled twice more."""
        await until(
            lambda: any(
                "not loading: " in text for text in self.supervisors[gang].gang.startup_notes
            )
        )
        last = self.disk.num_looks + 2
        await until(lambda: self.disk.num_looks >= last)

    def held(self) -> dict[tuple[str, int], str]:
        return {place: one.shell._weights for place, one in self.machines.ranks.items()}


@pytest.fixture(autouse=True)
def haste(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_S", "STARTING_POLL_S"):
        monkeypatch.setattr(gang_module, name, 0.002)
    monkeypatch.setattr(restart_policy, "PAUSE_S", 0.002)
    monkeypatch.setattr(rank_actor, "WEIGHTS_POLL_S", 0.002)


@asynccontextmanager
async def cluster(*sets: str) -> AsyncIterator[Cluster]:
    """Yield a prefill and a decode gang that have loaded the old weights."""
    disk = Disk()
    disk.may_load.set()
    machines, weights, epochs = ShellMachines(disk), ClusterWeights(), EpochCounter()
    config = load(None, ["control.startup_timeout_s=0.5", *sets])
    supervisors = {
        plan.name: GangSupervisor(plan, config, machines, epochs, lambda: None, weights=weights)
        for plan in plan_gangs(config)
    }
    for supervisor in supervisors.values():
        supervisor.start()
    made = Cluster(disk, machines, weights, supervisors)
    try:
        await made.ready()
        yield made
    finally:
        for supervisor in supervisors.values():
            await supervisor.stop(0.05)


async def test_a_rank_that_finds_other_weights_waits_and_says_both_digests() -> None:
    """The rank loads in the same process as soon as the old weights are back."""
    async with cluster() as made:
        made.disk.weights = NEW
        made.machines.ranks["prefill-0", 0].kill()
        await made.waits("prefill-0")
        gang = made.supervisors["prefill-0"].gang
        [text] = gang.startup_notes
        both = f"has weights with digest {NEW}, but this cluster serves digest {OLD}"
        assert text.startswith(f"prefill-0: not loading: model.path: {both}; restore those weights")
        assert text in gang.cause and gang.state == STARTING and not gang.is_given_up
        assert made.states["decode-0"] == READY and made.disk.loaded == [OLD, OLD]
        assert made.machines.num_begun == 3, "a waiting rank is not restarted"
        made.disk.weights = OLD
        await made.ready()
        assert made.machines.num_begun == 3 and made.disk.loaded == [OLD] * 3
        said = await made.machines.ranks["prefill-0", 0].get_state(0, 0, OLD)
        assert (said.activity, said.progress, said.wait_reason) == (LOADING, 0.0, "")


def test_waiting_is_no_stall() -> None:
    state = RankState(RankSpec("d", "decode", 1), "{}", 1, "", (0, 0))
    assert is_starting(state) and not is_starting(replace(state, wait_reason="for weights"))


async def test_other_ranks_of_the_gang_keep_their_weights() -> None:
    async with cluster("decode.dp_size=3") as made:
        before = [made.machines.ranks["decode-0", rank] for rank in range(3)]
        made.disk.weights = NEW
        before[1].kill()
        await made.waits("decode-0")
        assert [one.is_killed for one in before] == [False, True, False]
        made.disk.weights = OLD
        await made.ready()
        assert made.disk.loaded == [OLD] * 5 and made.machines.num_begun == 5


async def test_a_rank_waits_while_its_path_holds_nothing() -> None:
    """A link that is being moved, or a folder that is being filled, does not end the gang."""
    async with cluster() as made:
        made.disk.weights = ""
        made.machines.ranks["decode-0", 0].kill()
        await made.waits("decode-0")
        assert "no such folder" in made.supervisors["decode-0"].gang.cause
        made.disk.weights = OLD
        await made.ready()
        made.disk.weights = ""
        for rank in made.machines.ranks.values():
            rank.kill()
        await until(lambda: set(made.states.values()) == {DOWN})


async def test_a_cluster_whose_ranks_have_all_ended_has_the_new_weights() -> None:
    async with cluster() as made:
        made.disk.weights = NEW
        made.machines.ranks["prefill-0", 0].kill()
        await made.waits("prefill-0")
        made.machines.ranks["decode-0", 0].kill()
        await made.ready()
        assert set(made.held().values()) == {NEW} and made.weights.digest == NEW
        assert made.disk.loaded == [OLD, OLD, NEW, NEW]


async def test_of_two_ranks_that_start_with_different_weights_one_is_replaced_and_waits() -> None:
    """Two ranks load different weights before the controller knows the weights of the cluster. One
    of them is replaced and waits."""
    async with cluster() as made:
        for rank in made.machines.ranks.values():
            rank.kill()
        made.disk.may_load.clear()
        await until(lambda: made.machines.num_begun == 4)
        await until(lambda: all(one.shell._loading for one in made.machines.ranks.values()))
        first, second = made.machines.ranks["prefill-0", 0], made.machines.ranks["decode-0", 0]
        first.shell.disk = replace(made.disk, weights=NEW)
        made.disk.may_load.set()
        await until(lambda: first.is_killed or second.is_killed)
        loser = "prefill-0" if first.is_killed else "decode-0"
        made.machines.disk.weights = OLD if second.is_killed else NEW
        await made.waits(loser)
        failure = made.supervisors[loser].gang.failure
        assert failure is not None and failure.kind == "RankLost"
        assert OLD in failure.text and NEW in failure.text
        assert sorted(made.states.values()) == [READY, STARTING]


async def test_adopted_ranks_define_the_weights_of_the_cluster() -> None:
    """A restarted controller reads the weights of adopted ranks before it polls or starts a
    rank."""
    async with cluster() as made:
        rank, supervisor = made.machines.ranks["prefill-0", 0], made.supervisors["prefill-0"]
        state, weights = await rank.get_state(0, 0, None), ClusterWeights()
        adopting = GangSupervisor(
            supervisor.plan,
            supervisor.config,
            made.machines,
            EpochCounter(),
            lambda: None,
            weights=weights,
        )
        adopting.start([rank], [state])
        assert weights.digest == OLD
        await until(lambda: adopting.gang.state == READY)
        await adopting.stop(0.05)
        assert weights.digest == ""


async def test_a_waiting_rank_is_adopted_as_it_is() -> None:
    async with cluster() as made:
        made.disk.weights = NEW
        made.machines.ranks["decode-0", 0].kill()
        await made.waits("decode-0")
        waiting = made.machines.ranks["decode-0", 0]
        said = await waiting.get_state(0, 0, None)
        assert NEW in said.wait_reason and said.weights == "" and said.failure is None
        assert waiting.shell._cluster_weights == OLD


async def test_rebalancing_does_not_wait_for_weights() -> None:
    async with cluster("decode.dp_size=2") as made:
        supervisor = made.supervisors["decode-0"]
        made.disk.weights = NEW
        made.machines.ranks["decode-0", 1].kill()
        await made.waits("decode-0")
        supervisor.gang = replace(supervisor.gang, failure=None)
        with pytest.raises(RankLost, match=rf"decode-0: not loading: .* {NEW}, .* {OLD}"):
            await _wait_until_ready(supervisor)


def test_the_first_holder_decides_as_long_as_one_holds() -> None:
    weights, (a, b, c) = ClusterWeights(), "abc"
    assert weights.digest == "" and weights.record(a, "") and weights.digest == ""
    assert weights.record(a, OLD) and weights.record(b, OLD) and not weights.record(c, NEW)
    del weights.digest_by_rank[a]
    assert weights.digest == OLD and not weights.record(c, NEW) and weights.record(c, "")
    del weights.digest_by_rank[b]
    assert weights.digest == "" and weights.record(c, NEW) and weights.digest == NEW
