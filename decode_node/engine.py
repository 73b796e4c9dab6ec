"""The decode engine of one rank: reserve, activate, step, emit. Runs on the engine thread."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import compress

import torch
from torch import Tensor

from tandem.core.config import AUTO
from tandem.core.errors import NonFiniteLogits, PoisonRequest, StepFailed
from tandem.core.execution import CAPTURED
from tandem.core.identity import Identity
from tandem.core.request import ERROR, PREEMPTED, Request, SequenceUpdate, TokenLogprobs
from tandem.core.schema import to_failure
from tandem.core.stopping import truncate_at_stop
from tandem.decode_node.planning.scheduler import Scheduler
from tandem.decode_node.planning.states import RequestSize, RunningSequence
from tandem.decode_node.planning.step_plan import (
    CAPTURE,
    Proposal,
    StepPlan,
    StepReport,
    proposal_for,
)
from tandem.decode_node.planning.step_planner import StepPlanner
from tandem.decode_node.program.clock import synchronize
from tandem.decode_node.program.launcher import InFlightStep, Launcher
from tandem.model.sampling.acceptance.base import RowOutput
from tandem.runtime.engine_loop import is_fatal
from tandem.runtime.lockstep import Planner
from tandem.runtime.parts import RankParts

log = logging.getLogger(__name__)


class DecodeEngine:
    """``on_updates`` receives the updates of each step, ``on_grant`` whoever got a row, both on the
    engine thread.

    The page pool and the caches may be shared with a prefill engine on the same thread.
    ``planner`` is asked in every step, by default that of the rank's gang. ``step_s`` adds
    up the time of all steps, ``program_s`` that of their tensor programs.
    """

    def __init__(
        self,
        parts: RankParts,
        on_updates: Callable[[list[SequenceUpdate]], None],
        on_grant: Callable[[Identity], None],
        planner: Planner[Proposal, StepPlan] | None = None,
    ) -> None:
        loaded, pool, config = parts.loaded, parts.pool, parts.config
        max_rows, device_type = config.decode.max_num_seqs, loaded.device.type
        self._on_updates, self._on_grant = on_updates, on_grant
        self._levels = levels = parts.draft_shapes
        eos_ids = loaded.config.eos_token_ids
        self.scheduler = Scheduler(pool, max_rows, levels, loaded.max_model_len, eos_ids)
        self._catch_up = loaded.drafter.catch_up(levels[-1].depth)
        self._launcher = Launcher(parts, self._catch_up)
        self.programs = self._launcher.programs
        decide = StepPlanner.from_config(config, levels, self._catch_up)
        schema = Proposal, StepPlan
        self._planner = planner or parts.lockstep.planner(decide, schema, parts.loop.wake)
        self._loaded = loaded
        self._captures_ahead = loaded.exec_mode == CAPTURED
        self._may_capture_or_profile = decide.may_profile or self._captures_ahead
        self._report: StepReport | None = None
        overlap = config.decode.overlap
        self._is_overlapped = device_type != "cpu" if overlap == AUTO else overlap
        self._in_flight: deque[InFlightStep] = deque()
        self._at_risk: dict[Identity, RunningSequence] = {}
        self._updates: list[SequenceUpdate] = []
        self._crash_journal, self._counters = parts.loop.crash_journal, parts.counters
        self._counters["num_preempted"] = self._counters["num_non_finite"] = 0
        self.num_steps = 0
        self.step_s = self.program_s = 0.0

    def enqueue(self, identity: Identity, size: RequestSize) -> None:
        """Wait for a row and pages; ``on_grant`` tells when they are held. See Scheduler.ask for
        what it raises."""
        self.scheduler.enqueue(identity, size)
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
        sequence = self.scheduler.build_running(identity, request, is_suspect)
        sequence.backlog = self._catch_up.initial_backlog
        self._launcher.rows.add_row(sequence, first_token, features_F)
        # Otherwise the sequence ended with its first token and waits to be dropped.
        if sequence.num_output_left > 0:
            self.scheduler.start_steps(sequence)

    def drop(self, identity: Identity) -> bool:
        """End a sequence, or its wait, without a word; False if it was gone already."""
        dropped = self.scheduler.drop(identity)
        self._may_capture_or_profile = self._may_capture_or_profile or self._captures_ahead
        self._grant()
        return dropped

    def has_work(self) -> bool:
        is_wanted = self._planner.is_step_requested or self._may_capture_or_profile
        return bool(self._in_flight) or is_wanted or self.scheduler.has_running

    def close(self) -> None:
        """On the engine thread, when no step will follow."""
        self.programs.clear()

    @torch.inference_mode()
    def step(self) -> None:
        """Go on by one step and hand out the frame."""
        started_at = time.perf_counter()
        self._advance()
        self.num_steps += 1
        self._publish_updates()
        self._grant()
        self.step_s += time.perf_counter() - started_at

    def fail(self, error: Exception) -> None:
        """Whoever was in the step that raised this, or in one on its way, is given up and told,
        when the device writes to their pages no more. What was to be measured is learnt while
        serving then."""
        self._may_capture_or_profile = False
        with self._planner.waiting_for_device():
            synchronize(self._loaded.device)
        for step in self._in_flight:
            self.scheduler.on_complete(step.sequences)
            self._record_in_flight(step.sequences)
        self._in_flight.clear()
        self._fail_sequences(self._at_risk.values(), error)
        self._publish_updates()
        self._grant()

    def _fail_sequences(self, sequences: Iterable[RunningSequence], error: Exception) -> None:
        for sequence in sequences:
            identity, kind = (
                sequence.identity,
                PoisonRequest if sequence.num_isolated_steps else StepFailed,
            )
            if self.scheduler.drop(identity):
                failure = to_failure(kind(f"{identity}: a decode step failed: {error!r}"))
                self._updates.append(SequenceUpdate(identity, (), ERROR, failure=failure))

    def _advance(self) -> None:
        """Make room, propose and be answered with a plan, launch what it says, read.

        A plain loop reads what it has just launched. An overlapped one reads the step before,
        while the device runs this one: a sequence that turns out to have ended runs one wasted
        step, and its row and pages are freed after it. Who is preempted must have told all it
        has, so then the step on its way is read first. Both orders emit the same. Where somebody is
        suspected no two steps overlap: whose step it was has to be plain.
        """
        overlaps = self._is_overlapped and not self.scheduler.has_suspects()
        if not overlaps or self.scheduler.must_preempt():
            self._collect(num_kept=0)
        self._grow_or_preempt()
        sequences = self.scheduler.runnable(is_suspects_turn=self.num_steps % 2 == 0)
        plan = None
        if sequences or self._planner.is_step_requested or self._may_capture_or_profile:
            plan = self._planner.plan(self._proposal(sequences)).key
            # What was eager in steps of somebody's rows may be made when they have ended.
            self._may_capture_or_profile = plan is not None and (
                self._may_capture_or_profile or self._captures_ahead
            )
        if plan is not None and plan.purpose == CAPTURE:
            self._collect(num_kept=0)
            self._publish_updates()  # before a pause, in which nobody is at stake
            with self._planner.collective_section():
                self._launcher.capture_program(self._launcher.prepare([], plan))
        elif plan is not None:
            # Who has ended since it was proposed is padding now.
            self._launch([*compress(sequences, self.scheduler.are_running(sequences))], plan)
        self._collect(num_kept=1 if overlaps and plan is not None else 0)

    def _grow_or_preempt(self) -> None:
        """The preempted go on elsewhere or later, from what they have emitted."""
        preempted = self.scheduler.grow_or_preempt()
        self._counters["num_preempted"] += len(preempted)
        self._updates += [
            SequenceUpdate(sequence.identity, (), PREEMPTED, counts=sequence.counts)
            for sequence in preempted
        ]

    def _proposal(self, sequences: list[RunningSequence]) -> Proposal:
        """With the report that was not told yet."""
        report, self._report = self._report, None
        uncapturable = tuple(self.programs.uncapturable)
        has_pending_work = bool(self.scheduler.sequences or self.scheduler.num_waiting)
        fields = {
            "uncapturable": uncapturable,
            "has_pending_work": has_pending_work,
            "report": report,
        }
        return proposal_for(
            sequences, self._levels[-1].depth, exec_mode=self._loaded.exec_mode, **fields
        )

    def _launch(self, sequences: list[RunningSequence], plan: StepPlan) -> None:
        """If they cannot be prepared they are given up, and the step that was agreed upon is a
        dummy."""
        try:
            step = self._launcher.prepare(sequences, plan)
        except Exception as error:
            if is_fatal(error):
                raise
            log.exception("a decode step cannot be prepared")
            self._fail_sequences(sequences, error)
            step = self._launcher.prepare([], plan)
        self._record_in_flight(step.sequences)
        with self._planner.collective_section():
            self._in_flight.append(self._launcher.launch(step))
        self.scheduler.on_launch(step.sequences)

    def _collect(self, num_kept: int) -> None:
        """End what ended in the steps on their way, but for the latest ``num_kept``."""
        while len(self._in_flight) > num_kept:
            step = self._in_flight[0]
            self._record_in_flight(step.sequences)
            with self._planner.waiting_for_device():
                runs, self._report = step.collect()
            self._in_flight.popleft()
            self.program_s += self._report.program_s
            self.scheduler.on_complete(step.sequences)
            is_running = self.scheduler.are_running(step.sequences)
            for i, sequence in compress(enumerate(step.sequences), is_running):
                self._updates += self._emit(sequence, i, runs[i], step)

    def _record_in_flight(self, sequences: Iterable[RunningSequence]) -> None:
        """They fail if this turn does, and are suspects if it kills the process."""
        self._at_risk.update((sequence.identity, sequence) for sequence in sequences)
        is_isolated = any(sequence.num_isolated_steps for sequence in sequences)
        self._crash_journal.record_in_flight("decode", self._at_risk, is_isolated)

    def _publish_updates(self) -> None:
        """The frame of this turn; what is still on its way stays noted."""
        updates, self._updates, self._at_risk = self._updates, [], {}
        self._record_in_flight(
            [sequence for step in self._in_flight for sequence in step.sequences]
        )
        self._on_updates(updates)

    def _emit(
        self, sequence: RunningSequence, row: int, run: RowOutput, step: InFlightStep
    ) -> Iterator[SequenceUpdate]:
        """Yield what the step gave the sequence, then a failure if the sequence has to end there
        because its next logits are not finite."""
        kept, reason = truncate_at_stop(run.token_ids, sequence.stop_ids, sequence.num_output_left)
        sequence.record_step(self._levels[step.plan.key.shape_index], run.num_accepted, len(kept))
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
            failure = to_failure(NonFiniteLogits.of(sequence.identity, sequence.num_known))
            log.error("%s", failure.text)
            yield SequenceUpdate(sequence.identity, (), ERROR, failure=failure)

    def _grant(self) -> None:
        for identity in self.scheduler.grant():
            self._on_grant(identity)
