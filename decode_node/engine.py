"""The decode engine of one rank: admits sequences, runs draft/verify steps and emits tokens.

All methods run on the engine thread. A sequence passes through ``enqueue`` (wait for a row and
pages), ``activate`` (its KV cache has arrived), steps, and ``drop``.
"""

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
    StepPlan,
    StepProposal,
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
    """Runs the decode steps of all active sequences of a rank.

    ``on_updates`` receives the updates of every step. ``on_grant`` receives the identity of each
    sequence that was given a row and pages. Both are called on the engine thread. ``planner``
    agrees on every step with the other ranks. By default, it is the planner of the rank's gang. The
    page pool and the caches may be shared with a prefill engine on the same thread.

    ``step_s`` is the total time spent in steps, in seconds. ``program_s`` is the part of it that
    was spent in tensor programs.
    """

    def __init__(
        self,
        parts: RankParts,
        on_updates: Callable[[list[SequenceUpdate]], None],
        on_grant: Callable[[Identity], None],
        planner: Planner[StepProposal, StepPlan] | None = None,
    ) -> None:
        loaded = parts.loaded
        pool = parts.pool
        config = parts.config
        max_rows = config.decode.max_num_seqs
        device_type = loaded.device.type
        self._on_updates = on_updates
        self._on_grant = on_grant
        self._draft_shapes = draft_shapes = parts.draft_shapes
        eos_ids = loaded.config.eos_token_ids
        self.scheduler = Scheduler(
            pool=pool,
            max_rows=max_rows,
            draft_shapes=draft_shapes,
            max_model_len=loaded.max_model_len,
            eos_ids=eos_ids,
        )
        self._catch_up = loaded.drafter.catch_up(draft_shapes[-1].depth)
        self._launcher = Launcher(parts, self._catch_up)
        self.programs = self._launcher.programs
        decide = StepPlanner.from_config(config, draft_shapes, self._catch_up)
        schema = StepProposal, StepPlan
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
        self._crash_journal = parts.loop.crash_journal
        self._counters = parts.counters
        self._counters["num_preempted"] = self._counters["num_non_finite"] = 0
        self.num_steps = 0
        self.step_s = self.program_s = 0.0

    def enqueue(self, identity: Identity, size: RequestSize) -> None:
        """Queue a sequence for a row and pages. ``on_grant`` is called once it holds them.

        Raises the errors of ``Scheduler.enqueue``.
        """
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
        """Start the steps of a sequence whose KV cache is complete.

        Args:
            first_token: First output token. The prefill node has already emitted it.
            features_F: Drafter features of the last prompt tokens. None if none were handed over.
            is_suspect: Whether the sequence must run alone in its first steps.

        Raises:
            HandoverError: The sequence no longer holds a granted row.
        """
        sequence = self.scheduler.build_running(identity, request, is_suspect)
        sequence.backlog = self._catch_up.initial_backlog
        self._launcher.rows.add_row(sequence, first_token, features_F)
        # Without output left, the first token was the last one; the caller drops the sequence.
        if sequence.num_output_left > 0:
            self.scheduler.start_steps(sequence)

    def drop(self, identity: Identity) -> bool:
        """End a sequence, or its wait for a row, without an update.

        Returns False if the sequence held no row.
        """
        dropped = self.scheduler.drop(identity)
        self._may_capture_or_profile = self._may_capture_or_profile or self._captures_ahead
        self._grant()
        return dropped

    def has_work(self) -> bool:
        is_wanted = self._planner.is_step_requested or self._may_capture_or_profile
        return bool(self._in_flight) or is_wanted or self.scheduler.has_running

    def close(self) -> None:
        """Release the compiled programs. Called after the last step."""
        self.programs.clear()

    @torch.inference_mode()
    def step(self) -> None:
        """Run one engine step, publish its updates and grant free rows."""
        started_at = time.perf_counter()
        self._advance()
        self.num_steps += 1
        self._publish_updates()
        self._grant()
        self.step_s += time.perf_counter() - started_at

    def fail(self, error: Exception) -> None:
        """Recover from a step that raised ``error``.

        Waits for the device first, so that no page is still being written. Then ends all sequences
        of the failed step, and of steps in flight, with an error update. Startup profiling is
        abandoned; step costs are learned from real steps instead.
        """
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
            identity = sequence.identity
            kind = PoisonRequest if sequence.num_isolated_steps else StepFailed
            if self.scheduler.drop(identity):
                failure = to_failure(kind(f"{identity}: a decode step failed: {error!r}"))
                self._updates.append(SequenceUpdate(identity, (), ERROR, failure=failure))

    def _advance(self) -> None:
        """Run one iteration: allocate pages, propose, get the plan, launch, read results.

        Without overlap, the step that was just launched is read. With overlap, the previous step is
        read while the device runs the new one. A sequence whose end is found in the previous step
        then runs one wasted step. Its row and pages are freed after that step. The tokens are the
        same in both cases.

        Two situations suspend the overlap. Before a preemption, all tokens must be read. While a
        sequence is suspected of crashing ranks, only one step may be in flight, so that a crash can
        be attributed to it.
        """
        overlaps = self._is_overlapped and not self.scheduler.has_suspects()
        if not overlaps or self.scheduler.must_preempt():
            self._collect(num_kept=0)
        self._grow_or_preempt()
        sequences = self.scheduler.runnable(is_suspects_turn=self.num_steps % 2 == 0)
        plan = None
        if sequences or self._planner.is_step_requested or self._may_capture_or_profile:
            plan = self._planner.plan(self._proposal(sequences)).key
            # A serving step may request a program that is captured later. A plan of None means
            # that there is nothing to capture or profile until the next ``drop`` or serving step.
            self._may_capture_or_profile = plan is not None and (
                self._may_capture_or_profile or self._captures_ahead
            )
        if plan is not None and plan.purpose == CAPTURE:
            self._collect(num_kept=0)
            # A capture takes long, so updates must not wait for it. If it crashes the rank, no
            # sequence may be in the crash journal.
            self._publish_updates()
            with self._planner.collective_section():
                self._launcher.capture_program(self._launcher.prepare([], plan))
        elif plan is not None:
            # Sequences that have ended since the proposal are replaced by padding rows.
            self._launch([*compress(sequences, self.scheduler.are_running(sequences))], plan)
        self._collect(num_kept=1 if overlaps and plan is not None else 0)

    def _grow_or_preempt(self) -> None:
        """Allocate pages for the next steps, and preempt sequences if pages run out.

        A preempted sequence can resume from its output tokens.
        """
        preempted = self.scheduler.grow_or_preempt()
        self._counters["num_preempted"] += len(preempted)
        self._updates += [
            SequenceUpdate(sequence.identity, (), PREEMPTED, counts=sequence.counts)
            for sequence in preempted
        ]

    def _proposal(self, sequences: list[RunningSequence]) -> StepProposal:
        """Return the rank's proposal for the next step.

        The proposal includes the report of the step read last, unless that was sent already.
        """
        report = self._report
        self._report = None
        uncapturable = tuple(self.programs.uncapturable)
        has_pending_work = bool(self.scheduler.sequences or self.scheduler.num_waiting)
        fields = {
            "uncapturable": uncapturable,
            "has_pending_work": has_pending_work,
            "report": report,
        }
        return proposal_for(
            sequences, self._draft_shapes[-1].depth, exec_mode=self._loaded.exec_mode, **fields
        )

    def _launch(self, sequences: list[RunningSequence], plan: StepPlan) -> None:
        """Launch the planned step.

        If it cannot be prepared, its sequences fail, and a step of padding rows is launched
        instead. The rank must run the agreed step in any case, because the other ranks run it.
        """
        try:
            step = self._launcher.prepare(sequences, plan)
        except Exception as error:
            if is_fatal(error):
                raise
            log.exception("inputs of a decode step cannot be built; failing its sequences")
            self._fail_sequences(sequences, error)
            step = self._launcher.prepare([], plan)
        self._record_in_flight(step.sequences)
        with self._planner.collective_section():
            self._in_flight.append(self._launcher.launch(step))
        self.scheduler.on_launch(step.sequences)

    def _collect(self, num_kept: int) -> None:
        """Read the steps in flight, except the latest ``num_kept``, and process their output."""
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
                self._updates += self._emit(sequence=sequence, row=i, run=runs[i], step=step)

    def _record_in_flight(self, sequences: Iterable[RunningSequence]) -> None:
        """Record ``sequences`` as being at risk in this iteration.

        They fail if the iteration raises, and become suspects if it kills the process.
        """
        self._at_risk.update((sequence.identity, sequence) for sequence in sequences)
        is_isolated = any(sequence.num_isolated_steps for sequence in sequences)
        self._crash_journal.record_in_flight("decode", self._at_risk, is_isolated)

    def _publish_updates(self) -> None:
        """Publish the updates of this iteration.

        After that, the crash journal holds only the sequences of steps in flight.
        """
        updates = self._updates
        self._updates = []
        self._at_risk = {}
        self._record_in_flight(
            [sequence for step in self._in_flight for sequence in step.sequences]
        )
        self._on_updates(updates)

    def _emit(
        self, sequence: RunningSequence, row: int, run: RowOutput, step: InFlightStep
    ) -> Iterator[SequenceUpdate]:
        """Yield an update with new tokens, and an error update if the next logits are not finite.

        The sequence is dropped if it has ended for either reason.
        """
        kept_ids, reason = truncate_at_stop(
            run.token_ids, sequence.stop_ids, sequence.num_output_left
        )
        sequence.record_step(
            self._draft_shapes[step.plan.key.shape_index], run.num_accepted, len(kept_ids)
        )
        request = sequence.request
        is_broken = reason is None and not run.is_finite
        if reason is not None or is_broken:
            self.scheduler.drop(sequence.identity)
        counts = sequence.counts if reason is not None or request.sampling.stop else None
        logprobs: tuple[TokenLogprobs, ...] = ()
        if request.sampling.logprobs is not None:
            assert step.logprobs is not None, "the step computed no log probabilities"
            logprobs = step.logprobs.of_row(row, len(kept_ids), request.sampling.logprobs)
        if kept_ids:
            yield SequenceUpdate(
                sequence.identity, kept_ids, reason, counts=counts, logprobs=logprobs
            )
        if is_broken:
            self._counters["num_non_finite"] += 1
            failure = to_failure(NonFiniteLogits.of(sequence.identity, sequence.num_known))
            log.error("%s", failure.text)
            yield SequenceUpdate(sequence.identity, (), ERROR, failure=failure)

    def _grant(self) -> None:
        for identity in self.scheduler.grant():
            self._on_grant(identity)
