"""The decode engine of one rank: reserve, activate, step, emit. Runs on the engine thread."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import compress

import torch
from torch import Tensor

from tandem.core.config import AUTO
from tandem.core.errors import NonFinite, Poisonous, StepFailed
from tandem.core.forms import CAPTURED
from tandem.core.identity import Identity
from tandem.core.request import ERROR, PREEMPTED, Request, SequenceUpdate, TokenLogprobs
from tandem.core.schema import failure_of
from tandem.core.stopping import cut
from tandem.decode_node.planning.scheduler import Scheduler
from tandem.decode_node.planning.states import Running, Size
from tandem.decode_node.planning.step_plan import MAKE, Proposal, Report, StepPlan, wishes_of
from tandem.decode_node.planning.step_planner import StepPlanner
from tandem.decode_node.program.clock import settle
from tandem.decode_node.program.launcher import InFlight, Launcher
from tandem.model.sampling.acceptance.base import Run
from tandem.runtime.engine_loop import is_fatal
from tandem.runtime.lockstep import Planner
from tandem.runtime.parts import RankParts

log = logging.getLogger(__name__)


class DecodeEngine:
    """``on_frame`` receives the updates of each step, ``on_grant`` whoever got a row, both on the
    engine thread.

    The page pool and the caches may be shared with a prefill engine on the same thread.
    ``planner`` is asked in every step, by default that of the rank's gang. ``step_s`` adds
    up the time of all steps, ``program_s`` that of their tensor programs.
    """

    def __init__(
        self,
        parts: RankParts,
        on_frame: Callable[[list[SequenceUpdate]], None],
        on_grant: Callable[[Identity], None],
        planner: Planner[Proposal, StepPlan] | None = None,
    ) -> None:
        loaded, pool, config = parts.loaded, parts.pool, parts.config
        max_rows, device_type = config.decode.max_num_seqs, loaded.device.type
        self._on_frame, self._on_grant = on_frame, on_grant
        self._levels = levels = parts.levels
        eos_ids = loaded.config.eos_token_ids
        self.scheduler = Scheduler(pool, max_rows, levels, loaded.max_model_len, eos_ids)
        self._catch_up = loaded.drafter.catch_up(levels[-1].depth)
        self._launcher = Launcher(parts, self._catch_up)
        self.programs = self._launcher.programs
        decide = StepPlanner.of(config, levels, self._catch_up)
        schema = Proposal, StepPlan
        self._planner = planner or parts.lockstep.planner(decide, schema, parts.loop.wake)
        self._loaded = loaded
        self._makes_ahead = loaded.form == CAPTURED
        self._may_prepare = decide.measures or self._makes_ahead
        self._report: Report | None = None
        overlap = config.decode.overlap
        self._is_overlapped = device_type != "cpu" if overlap == AUTO else overlap
        self._in_flight: deque[InFlight] = deque()
        self._at_stake: dict[Identity, Running] = {}
        self._updates: list[SequenceUpdate] = []
        self._box, self._counters = parts.loop.box, parts.counters
        self._counters["num_preempted"] = self._counters["num_non_finite"] = 0
        self.num_steps = 0
        self.step_s = self.program_s = 0.0

    def ask(self, identity: Identity, size: Size) -> None:
        """Wait for a row and pages; ``on_grant`` tells when they are held. See Scheduler.ask for
        what it raises."""
        self.scheduler.ask(identity, size)
        self._grant()

    def activate(
        self,
        identity: Identity,
        request: Request,
        first_token: int,
        features_F: Tensor | None,
        is_suspect: bool = False,
    ) -> None:
        """Start stepping a sequence whose cache is complete.

        ``first_token`` was already emitted by the prefill node. ``features_F`` are those of the
        last prompt token, None for zero_hidden. Raises HandoverError when its grant is gone.
        """
        sequence = self.scheduler.started(identity, request, is_suspect)
        sequence.behind = self._catch_up.start
        self._launcher.rows.begin(sequence, first_token, features_F)
        if sequence.num_budget > 0:  # or it ended with its first token, and waits to be dropped
            self.scheduler.run(sequence)

    def drop(self, identity: Identity) -> bool:
        """End a sequence, or its wait, without a word; False if it was gone already."""
        dropped = self.scheduler.drop(identity)
        self._may_prepare = self._may_prepare or self._makes_ahead
        self._grant()
        return dropped

    def has_work(self) -> bool:
        is_wanted = self._planner.is_asked or self._may_prepare
        return bool(self._in_flight) or is_wanted or self.scheduler.has_running

    def close(self) -> None:
        """On the engine thread, when no step will follow."""
        self.programs.clear()

    @torch.inference_mode()
    def step(self) -> None:
        """Go on by one step and hand out the frame."""
        began_at = time.perf_counter()
        self._turn()
        self.num_steps += 1
        self._tell()
        self._grant()
        self.step_s += time.perf_counter() - began_at

    def fail(self, error: Exception) -> None:
        """Whoever was in the step that raised this, or in one on its way, is given up and told,
        when the device writes to their pages no more. What was to be measured is learnt while
        serving then."""
        self._may_prepare = False
        with self._planner.reading():
            settle(self._loaded.device)
        for step in self._in_flight:
            self.scheduler.landed(step.sequences)
            self._note(step.sequences)
        self._in_flight.clear()
        self._give_up(self._at_stake.values(), error)
        self._tell()
        self._grant()

    def _give_up(self, sequences: Iterable[Running], error: Exception) -> None:
        for sequence in sequences:
            identity, kind = sequence.identity, Poisonous if sequence.num_alone else StepFailed
            if self.scheduler.drop(identity):
                failure = failure_of(kind(f"{identity}: a decode step failed: {error!r}"))
                self._updates.append(SequenceUpdate(identity, (), ERROR, failure=failure))

    def _turn(self) -> None:
        """Make room, propose and be answered with a plan, launch what it says, read.

        A plain loop reads what it has just launched. An overlapped one reads the step before,
        while the device runs this one: a sequence that turns out to have ended runs one wasted
        step, and its row and pages are freed after it. Who is preempted must have told all it
        has, so then the step on its way is read first. Both orders emit the same. Where somebody is
        suspected no two steps overlap: whose step it was has to be plain.
        """
        overlaps = self._is_overlapped and not self.scheduler.has_suspects()
        if not overlaps or self.scheduler.must_preempt():
            self._read(num_kept=0)
        self._make_room()
        sequences = self.scheduler.runnable(suspects_turn=self.num_steps % 2 == 0)
        plan = None
        if sequences or self._planner.is_asked or self._may_prepare:
            plan = self._planner.plan(self._proposal(sequences)).key
            # What was eager in steps of somebody's rows may be made when they have ended.
            self._may_prepare = plan is not None and (self._may_prepare or self._makes_ahead)
        if plan is not None and plan.use == MAKE:
            self._read(num_kept=0)
            self._tell()  # before a pause, in which nobody is at stake
            with self._planner.program():
                self._launcher.make(self._launcher.prepare([], plan))
        elif plan is not None:
            # Who has ended since it was proposed is padding now.
            self._launch([*compress(sequences, self.scheduler.run_still(sequences))], plan)
        self._read(num_kept=1 if overlaps and plan is not None else 0)

    def _make_room(self) -> None:
        """The preempted go on elsewhere or later, from what they have emitted."""
        preempted = self.scheduler.make_room()
        self._counters["num_preempted"] += len(preempted)
        self._updates += [
            SequenceUpdate(sequence.identity, (), PREEMPTED, counts=sequence.counts)
            for sequence in preempted
        ]

    def _proposal(self, sequences: list[Running]) -> Proposal:
        """With the report that was not told yet."""
        report, self._report = self._report, None
        refused = tuple(self.programs.refused)
        expects = bool(self.scheduler.sequences or self.scheduler.num_waiting)
        told = {"refused": refused, "expects": expects, "report": report}
        return wishes_of(sequences, self._levels[-1].depth, form=self._loaded.form, **told)

    def _launch(self, sequences: list[Running], plan: StepPlan) -> None:
        """If they cannot be prepared they are given up, and the step that was agreed upon is a
        dummy."""
        try:
            step = self._launcher.prepare(sequences, plan)
        except Exception as error:
            if is_fatal(error):
                raise
            log.exception("a decode step cannot be prepared")
            self._give_up(sequences, error)
            step = self._launcher.prepare([], plan)
        self._note(step.sequences)
        with self._planner.program():
            self._in_flight.append(self._launcher.launch(step))
        self.scheduler.launched(step.sequences)

    def _read(self, num_kept: int) -> None:
        """End what ended in the steps on their way, but for the latest ``num_kept``."""
        while len(self._in_flight) > num_kept:
            step = self._in_flight[0]
            self._note(step.sequences)
            with self._planner.reading():
                runs, self._report = step.collect()
            self._in_flight.popleft()
            self.program_s += self._report.program_s
            self.scheduler.landed(step.sequences)
            still = self.scheduler.run_still(step.sequences)
            for i, sequence in compress(enumerate(step.sequences), still):
                self._updates += self._emit(sequence, i, runs[i], step)

    def _note(self, sequences: Iterable[Running]) -> None:
        """They fail if this turn does, and are suspects if it kills the process."""
        self._at_stake.update((sequence.identity, sequence) for sequence in sequences)
        is_alone = any(sequence.num_alone for sequence in sequences)
        self._box.note("decode", self._at_stake, is_alone)

    def _tell(self) -> None:
        """The frame of this turn; what is still on its way stays noted."""
        updates, self._updates, self._at_stake = self._updates, [], {}
        self._note([sequence for step in self._in_flight for sequence in step.sequences])
        self._on_frame(updates)

    def _emit(
        self, sequence: Running, row: int, run: Run, step: InFlight
    ) -> Iterator[SequenceUpdate]:
        """Yield what the step gave the sequence, then a failure if the sequence has to end there
        because its next logits are not finite."""
        kept, reason = cut(run.token_ids, sequence.stops, sequence.num_budget)
        sequence.record(self._levels[step.plan.key.level], run.num_accepted, len(kept))
        request = sequence.request
        is_broken = reason is None and not run.is_finite
        if reason is not None or is_broken:
            self.scheduler.drop(sequence.identity)
        counts = sequence.counts if reason is not None or request.sampling.stop else None
        logprobs: tuple[TokenLogprobs, ...] = ()
        if request.sampling.logprobs is not None:
            assert step.logprobs is not None, "somebody asked for log probabilities"
            logprobs = step.logprobs.of_row(row, len(kept), request.sampling.logprobs)
        if kept:
            yield SequenceUpdate(sequence.identity, kept, reason, counts=counts, logprobs=logprobs)
        if is_broken:
            self._counters["num_non_finite"] += 1
            failure = failure_of(NonFinite.of(sequence.identity, sequence.num_known))
            log.error("%s", failure.text)
            yield SequenceUpdate(sequence.identity, (), ERROR, failure=failure)

    def _grant(self) -> None:
        for identity in self.scheduler.grant():
            self._on_grant(identity)
