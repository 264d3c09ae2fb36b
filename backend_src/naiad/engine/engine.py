"""The engine: takes requests, computes one step at a time and returns outputs. A single thread uses it."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from naiad.engine.accounts import Accounts
from naiad.engine.beam_groups import BeamGroups
from naiad.engine.deadlines import Deadlines
from naiad.engine.live_sequence import LiveSequence, TextState
from naiad.engine.snapshots import take_snapshot
from naiad.engine.step_queue import StepQueue
from naiad.engine.step_record import StepRecord
from naiad.engine.step_runner import StepRunner
from naiad.errors import (
    NOT_STARTED,
    QUEUE_IS_FULL,
    InternalError,
    InvalidRequestError,
    NaiadError,
    UnavailableError,
)
from naiad.grammar import CompiledGrammar, Grammars
from naiad.outputs import (
    EngineStats,
    ModelOutput,
    RequestOutput,
    ServedModel,
    StepBatch,
    StepRow,
    error_output,
    timings_of,
)
from naiad.sampling.noise import sibling_seed
from naiad.sampling.stop_checker import first_stop
from naiad.scheduler.admission import AdmissionLimits
from naiad.scheduler.first_token_forecast import FirstTokenForecast
from naiad.scheduler.scheduler import Scheduler
from naiad.sequence import (
    EngineRequest,
    FinishReason,
    PrefixIdentity,
    SamplingParams,
    Sequence,
    SequenceStatus,
    TextContext,
)
from naiad.snapshot import EngineSnapshot
from naiad.usage import TenantUsage


class Engine:
    """Serves requests. Every accepted sequence ends with exactly one output that has a finish reason.

    Attributes:
        grammars: compiles the grammars of requests; None: such requests are refused.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        model_runner: StepRunner,
        text_state: Callable[[TextContext], TextState] | None = None,
        clock: Callable[[], float] = time.monotonic,
        overlaps: bool = False,
        grammars: Grammars | None = None,
        target_first_token_s: float = 0.0,
    ) -> None:
        """Put the parts together.

        Args:
            scheduler: a scheduler that has no sequences yet.
            model_runner: its KV cache consists of the blocks that the scheduler manages.
            text_state: makes the text state of a sequence whose request has a TextContext; None if there are
                no such requests.
            clock: returns the time in seconds; deadlines are measured by it.
            overlaps: whether to launch a step before the previous step's ids are known, if its rows can be
                projected.
            grammars: compiles the grammars of requests; None: such requests are refused.
            target_first_token_s: requests are refused whose first token is expected later, or after their own
                deadline; 0: none is refused for that.
        """
        kv_cache = scheduler.kv_cache
        longest = kv_cache.max_sequence_tokens
        self._scheduler = scheduler
        self._model_runner = model_runner
        self._text_state = text_state
        self._clock = clock
        # This limit ensures that any single sequence fits into the cache.
        self._limits = AdmissionLimits(
            max_model_len=min(model_runner.max_model_len, longest or model_runner.max_model_len),
            vocab_size=model_runner.model_config.vocab_size,
            max_num_seqs=scheduler.limits.max_num_seqs,
            kv_groups=kv_cache.groups,
        )
        self._live: dict[int, LiveSequence] = {}
        self._beams = BeamGroups(scheduler, text_state)
        # Outputs for the next step: aborting a search ends several ids, but `abort` returns one output.
        self._late: list[RequestOutput] = []
        self._deadlines = Deadlines(lambda each: each in self._live or each in self._beams)
        self._record = StepRecord(model_runner, Accounts(kv_cache.block_seconds))
        self._overlaps = overlaps
        self.grammars = grammars
        self._target_first_token_s = target_first_token_s
        self._forecast = FirstTokenForecast(scheduler)
        self._steps = StepQueue(scheduler, model_runner, self._record, clock, overlaps)

    @property
    def max_model_len(self) -> int:
        """Maximum number of prompt and output tokens together."""
        return self._limits.max_model_len

    @property
    def model_config(self) -> ServedModel:
        """The checkpoint's configuration."""
        return self._model_runner.model_config

    @property
    def has_work(self) -> bool:
        """Whether there is anything to compute or to return."""
        return self._scheduler.has_work or bool(self._late) or not self._steps.is_empty

    @property
    def num_waiting_tokens(self) -> int:
        """Number of known tokens of waiting sequences."""
        return self._scheduler.waiting.num_tokens

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request's sequences; no live sequence may have one of their ids.

        Siblings must have larger ids than the first sequence; each has outputs of its own. A grammar that
        is not compiled yet is compiled here, which may take seconds.

        Raises:
            InvalidRequestError: the request can never be served; the message names the field and its value.
            UnavailableError: its first token is expected too late.
        """
        self._limits.check(request)
        request = self._limits.clamp(request)
        grammar = self._grammar_of(request)
        assert self._live.keys().isdisjoint(request.sequence_ids), "an id is in use"
        assert request.sequence_id < min(request.sibling_ids, default=request.sequence_id + 1)
        first = self._make_sequence(request, request.sequence_id, request.params, None, grammar)
        if self._target_first_token_s:
            self._refuse_late(first, learns=request.beam is None)
        if request.beam is not None:
            self._beams.add(request, first)
            return
        self._add_sequence(request, first)
        for index, sequence_id in enumerate(request.sibling_ids, 1):
            params = msgspec.structs.replace(
                request.params,
                seed=sibling_seed(request.params.seed, index),
                num_prompt_log_probs=-1,
                returns_context_logits=False,
            )
            self._add_sequence(request, self._make_sequence(request, sequence_id, params, first, grammar))

    def _refuse_late(self, sequence: Sequence, learns: bool) -> None:
        """Refuse a request whose first token is expected too late, before it takes anybody's time.

        Args:
            sequence: the request's first sequence.
            learns: whether `learn` or `forget` is called for the sequence later; a search calls neither.
        """
        expected_s = self._forecast.seconds_until(sequence)
        about = f"the first token is expected in {expected_s:.1f} s"
        if expected_s > self._target_first_token_s:
            limit_ms = round(1000 * self._target_first_token_s)
            raise UnavailableError(f"{QUEUE_IS_FULL}: {about} (target_first_token_ms = {limit_ms})")
        if sequence.deadline_s is not None and sequence.arrival_s + expected_s > sequence.deadline_s:
            raise UnavailableError(f"{QUEUE_IS_FULL}: {about}, after the request's time limit")
        if learns:
            self._forecast.remember(sequence.sequence_id, expected_s)

    def _grammar_of(self, request: EngineRequest) -> CompiledGrammar | None:
        spec = request.params.grammar
        if spec is None:
            return None
        if request.beam is not None:
            width = len(request.sequence_ids)
            raise InvalidRequestError(f"beam_width = {width}: expected 1 with {spec.field}")
        if self.grammars is None:
            raise InvalidRequestError(f"{spec.field} is not supported: this engine has no tokenizer")
        return self.grammars.held(spec)

    def _make_sequence(
        self,
        request: EngineRequest,
        sequence_id: int,
        params: SamplingParams,
        donor: Sequence | None,
        grammar: CompiledGrammar | None = None,
    ) -> Sequence:
        now = self._clock() if donor is None else donor.arrival_s
        deadline_s = None if request.timeout_s is None else now + request.timeout_s
        if deadline_s is not None:
            self._deadlines.add(deadline_s, sequence_id)
        return Sequence(
            sequence_id=sequence_id,
            token_ids=list(request.prompt_token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
            params=params,
            arrival_s=now,
            deadline_s=deadline_s,
            tenant=request.cache_salt if request.tenant is None else request.tenant,
            prefix_identity=PrefixIdentity(request.cache_salt),
            donor=donor,
            offered_token_ids=request.draft_token_ids,
            retention=request.retention,
            grammar=grammar,
        )

    def _add_sequence(self, request: EngineRequest, sequence: Sequence) -> None:
        text = None
        if request.text is not None:
            assert self._text_state is not None, "this engine has no tokenizer"
            text = self._text_state(request.text)
        sequence.overlaps = self._overlaps and not self._model_runner.needs_ids(sequence.params)
        self._scheduler.add(sequence)
        self._live[sequence.sequence_id] = LiveSequence(sequence, text)

    def abort(self, sequence_id: int) -> RequestOutput | None:
        """End a sequence now; if it belongs to a beam search, the whole search ends.

        Its blocks are free when this returns, or when a step that is computing it has finished.

        Returns:
            Its last output, which `step` does not return again; None if no such sequence is live.
        """
        if sequence_id in self._beams:
            ended = self._end_search(sequence_id, FinishReason.CANCELLED)
            outputs = {each.sequence_id: each for each in ended}
            output = outputs.pop(sequence_id)
            self._late += outputs.values()
            return output
        live = self._live.get(sequence_id)
        return None if live is None else self._finish(live, FinishReason.CANCELLED)

    def step(self) -> list[RequestOutput]:
        """Compute one step and return its outputs, at most one for each sequence."""
        outputs, self._late = self._late + self._expire(), []
        has_queue, num_admissions = bool(self._scheduler.waiting), self._scheduler.num_admissions
        step, result = self._steps.take()
        if result.errors:
            self._clear_failed(step, result)
        for row in step.rows:
            outputs += self._outputs_of(row, result)
        outputs += self._record.take_starts(outputs)
        if step.rows:
            seconds, num_prompt_tokens = self._record.keep_step(self._scheduler)
            if self._target_first_token_s:
                num_admitted = self._scheduler.num_admissions - num_admissions
                self._forecast.take_step(seconds, num_prompt_tokens, num_admitted, has_queue)
        self._deadlines.forget_ended(len(self._live) + len(self._beams))
        return outputs

    def stats(self) -> EngineStats:
        """A copy of the gauges and totals as they are now."""
        return self._record.stats(self._scheduler)

    def usages(self) -> list[TenantUsage]:
        """What each tenant has used until now."""
        return self._record.accounts.usages()

    def snapshot(self) -> EngineSnapshot:
        """What the engine is doing now, for people who watch it."""
        return take_snapshot(self._scheduler, self._record, self._clock())

    def _clear_failed(self, step: StepBatch, result: ModelOutput) -> None:
        """Overwrite what failed rows have written before their blocks are freed and reused."""
        running, leaving = self._scheduler.running_by_id, self._scheduler.leaving
        failed = [
            running.get(row.sequence_id) or leaving[row.sequence_id]
            for row in step.rows
            if isinstance(result.errors.get(row.sequence_id), InternalError)
        ]
        if failed:
            self._model_runner.clear_blocks(self._scheduler.kv_cache.retract(failed))

    def _outputs_of(self, row: StepRow, result: ModelOutput) -> list[RequestOutput]:
        sequence_id = row.sequence_id
        sequence = self._scheduler.running_by_id.get(sequence_id)
        if sequence is None:
            # The sequence has ended since the step was launched, or just now: the beams of a search end
            # together.
            self._scheduler.release(sequence_id)
            return []
        error = result.errors.get(sequence_id)
        if sequence.params.num_candidates:
            return self._beam_outputs(row, sequence, result, error)
        live = self._live[sequence_id]
        if error is not None:
            return [self._fail(live, error)]
        if sequence.params.describes_prompt:
            live.take_prompt_details(row, result)
        output = self._take_new_tokens(live, result) if row.samples else None
        return [] if output is None else [output]

    def _beam_outputs(
        self, row: StepRow, sequence: Sequence, result: ModelOutput, error: NaiadError | None
    ) -> list[RequestOutput]:
        sequence_id = row.sequence_id
        if error is not None:
            return self._beams.fail(sequence_id, error)
        if not row.samples:
            return []
        if sequence.num_tokens == sequence.num_prompt_tokens:
            self._record.take_prompt(sequence)
        outputs = self._beams.take(sequence, result)
        self._take_texts(sequence, outputs)
        return outputs

    def _end_search(self, sequence_id: int, reason: FinishReason) -> list[RequestOutput]:
        """End a beam search early; return the outputs of all its ids."""
        first = self._beams.first_sequence(sequence_id)
        outputs = self._beams.end(sequence_id, reason)
        self._take_texts(first, outputs)
        return outputs

    def _take_texts(self, sequence: Sequence, outputs: list[RequestOutput]) -> None:
        """Count the texts of a beam search that has ended, to which the sequence belongs."""
        if outputs:
            self._record.take_output(sequence, sum(len(output.token_ids) for output in outputs))

    def _take_new_tokens(self, live: LiveSequence, result: ModelOutput) -> RequestOutput | None:
        """Take the step's tokens: send them, hold them back, or end the sequence.

        If a token completes a stop string and reaches the maximum length, the finish reason is `stop`.
        """
        sequence = live.sequence
        num_new = len(result.sampled_token_ids[sequence.sequence_id])
        num_before = sequence.num_tokens - num_new
        if num_before == sequence.num_prompt_tokens:
            self._record.take_prompt(sequence)
            self._forecast.learn(sequence.sequence_id, sequence.first_token_s - sequence.arrival_s)
        stop, num_known = first_stop(sequence, num_before)
        has_end = stop is not None and not stop.keeps_token
        num_output = num_known - num_before - has_end
        token_ids = sequence.token_ids[num_before : num_before + num_output]
        live.take_token_details(result, num_output, has_end)
        output = live.output(token_ids, is_last=stop is not None)
        self._record.take_output(sequence, len(output.token_ids))
        if output.is_cut:
            output.finish_reason = FinishReason.STOP
        elif stop is not None:
            output.finish_reason = stop.finish_reason
            output.stop_reason = stop.stop_reason
        if output.finish_reason is not None:
            num_kept = sequence.num_prompt_tokens + live.num_sent_tokens if output.is_cut else num_known
            self._scheduler.cut(sequence, num_kept, num_new)
            output.num_accepted_tokens = sequence.num_accepted_tokens
            self._leave(sequence)
        elif output.only_started:
            return None
        return output

    def _expire(self) -> list[RequestOutput]:
        """End the sequences whose deadlines have passed."""
        outputs: list[RequestOutput] = []
        for sequence_id in self._deadlines.pop_passed(self._clock()):
            live = self._live.get(sequence_id)
            sequence = live.sequence if live is not None else self._beams.first_sequence(sequence_id)
            has_started = sequence.status is SequenceStatus.RUNNING or sequence.num_preemptions > 0
            ended = (
                [self._finish(live, FinishReason.TIMEOUT)]
                if live is not None
                else self._end_search(sequence_id, FinishReason.TIMEOUT)
            )
            if not has_started:
                for output in ended:
                    output.error_status = UnavailableError.status
                    output.error_message = NOT_STARTED
            outputs += ended
        return outputs

    def _finish(self, live: LiveSequence, reason: FinishReason) -> RequestOutput:
        """End a sequence early; the output holds the tokens that were held back."""
        output = live.output([], is_last=True)
        output.finish_reason = reason
        self._record.take_output(live.sequence, len(output.token_ids))
        self._leave(live.sequence)
        return output

    def _fail(self, live: LiveSequence, error: NaiadError) -> RequestOutput:
        self._leave(live.sequence)
        sequence = live.sequence
        return error_output(sequence.sequence_id, error.status, str(error), timings_of(sequence))

    def _leave(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        self._forecast.forget(sequence.sequence_id)
        del self._live[sequence.sequence_id]
