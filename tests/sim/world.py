"""The cluster of one seed: its machines, gateways and the record of its events."""

import asyncio
import hashlib
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ray.exceptions import RayError

from tandem.cluster.control.controller import Controller
from tandem.cluster.control.members import RayMembers
from tandem.cluster.gateway import gateway as gateways
from tandem.cluster.gateway import tokenising
from tandem.cluster.gateway.admission import Admission
from tandem.cluster.gateway.gateway import ClusterGateway
from tandem.core.config import TINY_MODEL, TandemConfig, load
from tandem.core.config_shared import config_differences
from tandem.core.control import Control
from tandem.core.errors import TandemError
from tandem.core.membership import RankSpec
from tandem.decode_node.engine import DecodeEngine
from tandem.decode_node.program.rows import Rows
from tandem.kv_transfer import channel
from tandem.kv_transfer.caches import PagedCaches
from tandem.kv_transfer.peer_link import PeerLink
from tandem.kv_transfer.sink import Sink
from tandem.net import listener
from tandem.prefill_node.engine import PrefillEngine
from tandem.runtime import parts, rank_actor, stall_detector
from tandem.runtime.gang import planner_server
from tandem.text.tokenizer import Tokenizer
from tests.sim import chance
from tests.sim.actors import Machine
from tests.sim.fake_ray import FakeRay
from tests.sim.lockstep import Gangs
from tests.sim.loop import Process, SimLoop, here
from tests.sim.mix import Mix, mix_of
from tests.sim.model import NUM_TOKENS, Loads, raise_once
from tests.sim.net import Net
from tests.sim.threads import Threads
from tests.sim.tokenising import LONG_CHARS, MAX_CHARS, slow_tokenizer
from tests.sim.wire import Wires

SETS = (
    *("kv.page_size=4", "kv.num_pages=60", "decode.max_num_seqs=4", "model.max_model_len=200"),
    *("speculation.drafter=none", "speculation.profile_at_startup=false", "model.kernels=torch"),
    *("kv_transfer.lease_s=8", "kv_transfer.staging_bytes=65536", "control.stall_timeout_s=3"),
    *(
        "control.startup_timeout_s=30",
        "control.drain_timeout_s=5",
        "prefill.max_num_batched_tokens=64",
        "server.max_queued=64",
    ),
)
BUILDERS = (
    "tandem.colocated_node.rank",
    "tandem.decode_node.service.rank",
    "tandem.prefill_node.rank",
)
for _name in BUILDERS:
    import_module(_name)  # import now instead of in the middle of a seed
START_RANK, LINK = parts.start_rank, Sink._link
ATTACH, SCATTER, BEGIN = Controller._attach, PagedCaches.scatter, Rows.add_row
ONE, OTHER = "one", "other"
SPARE_STREAMS = 3
"""Open streams beyond those with or waiting for a row, where gateways have little capacity."""


@cache
def checkpoint(name: str) -> Path:
    """Return the folder of a checkpoint: the cluster's is ONE, another one is OTHER."""
    folder = Path(tempfile.mkdtemp(prefix=f"tandem-sim-{name}-"))
    config = json.loads((TINY_MODEL / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "max_position_embeddings": 256}
    config |= {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "vocab_size": NUM_TOKENS}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(_few_tokens()))
    return folder


def _few_tokens() -> dict[str, Any]:
    """Return the shipped tokenizer with only its first tokens, each of which is one character."""
    tree: dict[str, Any] = json.loads((TINY_MODEL / "tokenizer.json").read_text())
    model, added = tree["model"], tree["added_tokens"]
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < NUM_TOKENS}
    model["merges"] = []
    tree["added_tokens"] = [token for token in added if token["id"] < NUM_TOKENS]
    return tree


@cache
def tokenizer(is_slow: bool = False) -> Tokenizer:
    return slow_tokenizer(checkpoint(ONE)) if is_slow else Tokenizer(checkpoint(ONE))


@cache
def configured(*sets: str, name: str) -> TandemConfig:
    return load(None, [f"model.path={checkpoint(name)}", *SETS, *sets])


@dataclass(eq=False)
class Gateway:
    """A gateway, including its restarts."""

    name: str
    process: Process
    admission: Admission | None = None
    gateway: ClusterGateway | None = None
    is_serving: bool = False


class World:
    """A simulated cluster, built and run inside ``patched``. ``trace`` is a hash of all events."""

    def __init__(self, seed: int) -> None:
        self.seed, self.draw = seed, random.Random(seed)
        self.mix: Mix = mix_of(seed)
        self.loop = SimLoop()
        self.threads = Threads(self.loop)
        self.net = Net(self.loop, random.Random(self.draw.random()))
        self.loop.threads, self.loop.net = self.threads, self.net
        self.wires = Wires(self.net, self.threads)
        drawn = random.Random(self.draw.random())
        self.ray = FakeRay(self.loop, self.net, self.threads, drawn, self.told)
        self.ray.constructs_fail = self.mix.is_edge
        self.lives: set[str] = set()
        self.linked: dict[tuple[Sink, str], int] = {}
        self.gangs = Gangs(self.net)
        self._configs = [configured(*self.mix.sets, name=name) for name in (ONE, OTHER)]
        self.config = self._configs[0]
        self.loads = Loads(checkpoint(ONE), random.Random(self.draw.random()))
        self.loads.step_s = self.mix.step_s
        self.digests: set[str] = set()
        """Digests of all weights that a rank has served."""
        self.well_since = 0.0
        """Last time at which the cluster was unhealthy (service.py)."""
        self.on_life: Callable[[Process], None] = lambda life: None
        self.gateways: list[Gateway] = []
        self.failures: list[str] = []
        self.num_updates: dict[str, int] = {}
        self._trace = hashlib.sha256()
        self.keeps_log = False
        self.folder = Path(tempfile.mkdtemp(prefix="tandem-sim-run-"))

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Replace the machine below the cluster with this world's during the block."""
        changes: list[Any] = [
            patch.object(parts, "load_model", self.loads),
            patch.object(parts, "GangLockstep", self.gangs.member),
            patch.object(parts, "start_rank", self._start_rank),
            patch.object(Sink, "_link", lambda *args, **named: self._link(*args, **named)),
            patch.object(planner_server, "PlannerServer", self.gangs.hub),
            patch.object(listener, "_raise_backlog", lambda server: None),
            patch.object(stall_detector, "read_cpu_wait_s", lambda thread_id: 0.0),
            patch.object(rank_actor, "_stderr_path", lambda: str(self.folder / "log")),
            patch.object(channel, "store_server", self.wires.store_server),
            patch.object(channel, "store_client", self.wires.store_client),
            patch.object(channel, "GlooBackend", self.wires.backend),
            # Torch's mode belongs to the single real thread, so it would affect other processes as
            # well.
            patch.object(DecodeEngine, "step", DecodeEngine.step.__wrapped__),
            patch.object(PrefillEngine, "step", PrefillEngine.step.__wrapped__),
            *(self._edge_changes() if self.mix.is_edge else ()),
            *self.ray.patched(),
        ]
        with ExitStack() as stack:
            stack.enter_context(self.threads.patched())
            stack.enter_context(chance.patched(random.Random(self.draw.random())))
            for change in changes:
                stack.enter_context(change)
            try:
                yield
            finally:
                self.threads.end()
                shutil.rmtree(self.folder, ignore_errors=True)

    def _edge_changes(self) -> list[Any]:
        """Return patches for gateways with little capacity: scaled bounds, and functions that may
        fail."""
        arrivals = self.loads.arrivals

        def scatter(caches: PagedCaches, *given: Any, **named: Any) -> None:
            raise_once(arrivals)
            SCATTER(caches, *given, **named)

        def begin(rows: Rows, *given: Any, **named: Any) -> None:
            raise_once(arrivals)
            BEGIN(rows, *given, **named)

        async def attach(controller: Controller, config: TandemConfig) -> None:
            before = controller._config
            await ATTACH(controller, config)
            if before is not None and self.digests and config_differences(before, config):
                self.wrong("the config of a cluster that has served is replaced")

        return [
            patch.object(tokenising, "LONG_CHARS", LONG_CHARS),
            patch.object(tokenising, "MAX_CHARS", MAX_CHARS),
            patch.object(gateways, "SPARE_STREAMS", SPARE_STREAMS),
            patch.object(PagedCaches, "scatter", scatter),
            patch.object(Rows, "add_row", begin),
            patch.object(Controller, "_attach", attach),
        ]

    def other_config(self) -> TandemConfig:
        """Return the config that the cluster is not served with."""
        return self._configs[self.config is self._configs[0]]

    @property
    def trace(self) -> str:
        return self._trace.hexdigest()[:16]

    def told(self, what: str, *more: Any) -> None:
        """Record an event."""
        self.num_updates[what] = self.num_updates.get(what, 0) + 1
        line = " ".join([f"{self.loop.time():.6f}", what, *map(str, more)])
        self._trace.update(line.encode())
        if self.keeps_log:
            print(line, flush=True)

    def wrong(self, text: str) -> None:
        """Record a violation."""
        self.told("WRONG", text)
        self.failures.append(f"{self.loop.time():.3f}: {text}")
        self.loop.stop()

    async def _start_rank(
        self,
        builder: str,
        spec: RankSpec,
        memory: parts.ResidentModel,
        *given: Any,
        **build_options: Any,
    ) -> Any:
        """Start a rank like runtime/parts.py, and check that each epoch of a rank starts only
        once."""
        if spec.epoch_name in self.lives:
            self.wrong(f"{spec.epoch_name} is begun twice")
        self.lives.add(spec.epoch_name)
        self.digests.add(memory.loaded.digest)
        self.told("life", spec.epoch_name)
        self.on_life(here())
        return await START_RANK(builder, spec, memory, *given, **build_options)

    def _link(
        self, sink: Sink, owner: str, rank_name: str, epoch: int, control: Control
    ) -> PeerLink:
        """Link like the product's Sink, and check that it never returns to an earlier epoch of a
        rank."""
        link = LINK(sink, owner, rank_name, epoch, control)
        if epoch < self.linked.get((sink, rank_name), epoch):
            self.wrong(f"{sink._local_rank} has a link to {rank_name} of epoch {epoch} again")
        self.linked[sink, rank_name] = epoch
        return link

    # Machines and gateways

    def add_machine(self, num_cpus: float) -> Machine:
        number = len(self.ray.machines)
        machine = Machine(f"m{number}", f"10.0.0.{number + 1}", num_cpus)
        self.ray.machines.append(machine)
        return machine

    def begin_gateway(self, name: str) -> Gateway:
        process = Process(self.loop, name, self.mix.gateways[name])
        gateway = Gateway(name, process)
        self.gateways = [one for one in self.gateways if one.name != name] + [gateway]
        self.told("begin", name)
        process.start(self._serve(gateway))
        return gateway

    async def _serve(self, gateway: Gateway) -> None:
        while True:
            try:
                members = await RayMembers.attach(config := self.config)
                await members.wait_until_started(lambda text: None)
                break
            except (TandemError, RayError, ValueError) as error:
                self.told("not started", gateway.name, type(error).__name__)
                await asyncio.sleep(1.0)  # time: virtual
        gateway.admission = admission = Admission(config)
        texts = tokenizer(self.mix.is_edge)
        gateway.gateway = made = ClusterGateway(config, texts, members)
        await made.fleet.wait_until_warm()
        await admission.attach(made)
        gateway.is_serving = True
        self.told("serving", gateway.name)
