"""Assembly of a rank of any kind from its parts, and its description for the cluster."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from tandem.core.config import TandemConfig
from tandem.core.draft_shapes import DraftShapes
from tandem.core.info import PREFILL, ModelInfo
from tandem.core.membership import RankInfo, RankSpec, Rendezvous
from tandem.core.placement import Placement
from tandem.core.tasks import run_in_thread
from tandem.kv_transfer import caches as transfer
from tandem.kv_transfer.budget import default_num_pages
from tandem.kv_transfer.channel import channel_factory_from_config
from tandem.kv_transfer.endpoint import TransferEndpoint
from tandem.kv_transfer.pages import PagePool
from tandem.model.loaded import LoadedModel, load_model
from tandem.model.network.cache import Caches
from tandem.runtime.crash_journal import CrashJournal
from tandem.runtime.engine_loop import EngineLoop
from tandem.runtime.gang.gang_lockstep import GangLockstep
from tandem.runtime.gang.planner_server import PlannerServer
from tandem.runtime.lockstep import Lockstep


@dataclass(frozen=True, slots=True)
class RankParts:
    """The parts that a rank of any kind is built from.

    ``loop`` is not started yet. Its thread owns the pages and caches. ``lockstep`` belongs to the
    code that ends the rank's epoch. ``counters`` appear in the rank's status by name. Each counter
    is incremented on one thread only.
    """

    spec: RankSpec
    config: TandemConfig
    loaded: LoadedModel
    pool: PagePool
    caches: Caches
    loop: EngineLoop
    lockstep: Lockstep = field(default_factory=Lockstep)
    counters: Counter[str] = field(default_factory=Counter)

    @property
    def draft_shapes(self) -> DraftShapes:
        """Draft shapes that the rank's steps can have."""
        return self.loaded.drafter.draft_shapes(self.config.speculation.max_depth)

    def transfer_caches(self) -> transfer.PagedCaches:
        """Return a view of the caches for KV transfers, which shares their memory."""
        loaded = self.loaded
        spec_config = self.config.speculation
        num_features = loaded.drafter.num_handover_features if spec_config.handover_hidden else 0
        what = loaded.dtype_name, loaded.digest, num_features, loaded.drafter.identity
        copy = loaded.kernels.copy_rows
        return transfer.PagedCaches(self.caches, self.pool, *what, copy)

    def transfer_endpoint(self) -> TransferEndpoint:
        """Create the endpoint for KV transfers from or to these caches, at the rank's address."""
        channel_factory = channel_factory_from_config(self.config, self.spec.kind, self.spec.host)
        return TransferEndpoint(
            caches=self.transfer_caches(),
            engine=self.loop,
            channel_factory=channel_factory,
            config=self.config.kv_transfer,
        )

    def info(self) -> RankInfo:
        """Return the rank's description for the cluster's membership."""
        config = self.config
        loaded = self.loaded
        form = "" if self.spec.kind == PREFILL else f", {loaded.exec_mode}"
        return RankInfo(
            spec=self.spec,
            caches=self.transfer_caches().layout.compatibility_facts(),
            drafter=loaded.drafter.name,
            model=ModelInfo(
                name=config.model.path.name,
                architecture=loaded.config.model_type,
                max_model_len=loaded.max_model_len,
                vocab_size=loaded.config.vocab_size,
                eos_token_ids=loaded.config.eos_token_ids,
                num_draft_tokens=self.draft_shapes[-1].depth,
                has_mtp=loaded.has_mtp,
                dtype=loaded.dtype_name,
                think_token_ids=loaded.think_ids or (),
                has_trees=not self.draft_shapes[-1].is_chain,
                digest=loaded.digest,
            ),
            max_tokens=self.pool.max_tokens,
            max_rows=config.decode.max_num_seqs,
            fallback_reason=loaded.kernels.fallback_reason,
            tokenizer=loaded.tokenizer_digest,
            kernels=f"{loaded.kernels.name}{form}",
        )


@dataclass(frozen=True, slots=True)
class ResidentModel:
    """Weights and caches, which a rank keeps from one epoch of its gang to the next."""

    config: TandemConfig
    loaded: LoadedModel
    num_pages: int
    caches: Caches


def load_resident_model(
    spec: RankSpec,
    config: TandemConfig,
    placement: Placement | None = None,
    check_digest: Callable[[str], None] = lambda digest: None,
) -> ResidentModel:
    """Read the rank's part of the checkpoint and allocate its pages. Blocks until both are done.

    Raises ValueError for a mistake in the configuration or checkpoint, and the errors of
    ``check_digest`` (see ``load_model``).
    """
    loaded = load_model(
        config=config,
        kind=spec.kind,
        rank=spec.rank,
        placement=placement,
        check_digest=check_digest,
    )
    page_bounds = loaded.device, loaded.max_model_len, loaded.bytes_per_token
    num_pages = config.kv.num_pages or default_num_pages(config, *page_bounds)
    return ResidentModel(
        config=config,
        loaded=loaded,
        num_pages=num_pages,
        caches=loaded.allocate_caches(num_pages, config.kv.page_size),
    )


async def start_rank(
    builder: str,
    spec: RankSpec,
    resident_model: ResidentModel,
    rendezvous: Rendezvous | None = None,
    planner_server: PlannerServer | None = None,
    crash_journal_path: str = "",
    **build_options: Any,
) -> Any:
    """Build a rank for one epoch and start it; first meet the other ranks of its gang, if any.

    Args:
        builder: Name of the module whose ``build(parts, **build_options)`` creates the rank.
        spec: Parameters of the rank in this epoch.
        resident_model: Weights and caches.
        rendezvous: Where the ranks of the gang meet; None for a gang of one rank.
        planner_server: The gang's planner if this is rank 0, otherwise None. The caller closes it
            if this call fails.
        crash_journal_path: File that records the sequences of each step, "" for none.

    Raises:
        ValueError: The configuration is invalid.
        EpochEnded: The ranks of the gang do not meet in time.
    """
    module = await asyncio.to_thread(import_module, builder)
    config = resident_model.config
    loaded = resident_model.loaded
    pool = PagePool(resident_model.num_pages, config.kv.page_size)
    crash_journal = CrashJournal(crash_journal_path)
    compile_s = loaded.kernels.compile_s
    # A rank that is compiling kernels does not count as stalled, so compile time is subtracted.
    clock = lambda: time.monotonic() - compile_s()  # noqa: E731
    loop = EngineLoop(
        name=f"engine-{spec.rank_name}",
        crash_journal=crash_journal,
        stuck_s=config.control.stall_timeout_s,
        clock=clock,
    )
    lockstep = Lockstep()
    if rendezvous is not None:
        lockstep = await run_in_thread(
            lambda: GangLockstep(
                spec=spec,
                rendezvous=rendezvous,
                planner_server=planner_server,
                device=loaded.device,
                stall_detector=loop.stall_detector,
            )
        )
    try:
        loaded.dispatch.set_group(lockstep.collectives)
        parts = RankParts(
            spec=spec,
            config=config,
            loaded=loaded,
            pool=pool,
            caches=resident_model.caches,
            loop=loop,
            lockstep=lockstep,
        )
        rank = await module.build(parts, **build_options)
    except BaseException:
        lockstep.close()
        raise
    loop.on_end(lambda: _leave(lockstep, loop))
    loop.start()
    return rank


def _leave(lockstep: Lockstep, loop: EngineLoop) -> None:
    """Close ``lockstep``. All graphs must be gone, because they use its collectives."""
    try:
        assert not loop.has_engines, "engines must be closed before the epoch ends"
    finally:
        lockstep.close()
