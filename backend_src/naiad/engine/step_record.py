"""Statistics of the engine's steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping

from naiad.engine.accounts import Accounts
from naiad.engine.step_history import StepHistory
from naiad.engine.step_runner import StepRunner
from naiad.outputs import EngineStats, MemoryUse, ModelOutput, RequestOutput, StepRow
from naiad.scheduler.scheduler import Scheduler
from naiad.sequence import Sequence
from naiad.speculation.speculator import DraftTotals

_NO_DRAFTS = DraftTotals()


class StepRecord:
    """Counts steps and tokens, and records in each sequence when it was started and got its tokens.

    Attributes:
        num_prompt_tokens: number of prompt tokens of the sequences that have had a token.
        num_generation_tokens: number of output tokens that have been sent.
        history: what the last steps computed.
        accounts: what each tenant has used.
    """

    def __init__(self, runner: StepRunner, accounts: Accounts) -> None:
        """Start from zero; `stats` asks the runner for its memory use and its late compiles."""
        self.accounts = accounts
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self._started: list[int] = []
        self._num_steps = 0
        self._num_context_tokens = 0
        self.history = StepHistory()
        # Begin, prompt tokens, decoding rows and tenants' tokens of the steps that have been launched; two at
        # most.
        self._launched: deque[tuple[float, int, int, dict[str, int]]] = deque()
        self._ended_s = self._kept_s = 0.0
        self._runner = runner
        self._memory = MemoryUse()
        self._timestamp_s = 0

    def begin_step(self, rows: Collection[StepRow], running: Mapping[int, Sequence], now_s: float) -> None:
        """Record that these rows of running sequences are about to be computed."""
        self._num_steps += 1
        self._num_context_tokens = num_prefill_rows = 0
        for row in rows:
            sequence = running[row.sequence_id]
            if not sequence.first_scheduled_s:
                sequence.first_scheduled_s = now_s
                self._started.append(sequence.sequence_id)
            if row.start < sequence.num_prompt_tokens:
                self._num_context_tokens += min(len(row.token_ids), sequence.num_prompt_tokens - row.start)
                num_prefill_rows += 1
        if rows:
            tokens = self.accounts.split(rows, running)
            num_decode_rows = len(rows) - num_prefill_rows
            self._launched.append((now_s, self._num_context_tokens, num_decode_rows, tokens))

    def take_prompt(self, sequence: Sequence) -> None:
        """Count the prompt of a sequence that has got its first token."""
        self.num_prompt_tokens += sequence.num_prompt_tokens
        self.accounts.charge_prompt(sequence)

    def take_output(self, sequence: Sequence, num_tokens: int) -> None:
        """Count tokens that are sent."""
        self.num_generation_tokens += num_tokens
        self.accounts.charge_output(sequence.tenant, num_tokens)

    def take_starts(self, outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
        """Return outputs that report the sequences started since the last call, except those in `outputs`."""
        started, self._started = self._started, []
        reported = {output.sequence_id for output in outputs} if started else set()
        return [RequestOutput(each, []) for each in started if each not in reported]

    def end_step(
        self, rows: Iterable[StepRow], running: Mapping[int, Sequence], result: ModelOutput, now_s: float
    ) -> None:
        """Record that these rows have been computed; some of their sequences may have ended."""
        self._ended_s = now_s
        for row in rows:
            sequence = running.get(row.sequence_id)
            if sequence is not None and row.samples and row.sequence_id not in result.errors:
                sequence.last_token_s = now_s
                if not sequence.first_token_s:
                    sequence.first_token_s = now_s
                    self.history.add_first_token(now_s, now_s - sequence.arrival_s)

    def keep_step(self, scheduler: Scheduler) -> tuple[float, int]:
        """Remember the step that has ended last, now that its tokens have been taken.

        Returns:
            The seconds that it took after the step before it, and the number of prompt tokens.
        """
        begin_s, num_context_tokens, num_decode_rows, tokens = self._launched.popleft()
        drafts = scheduler.speculator.totals if scheduler.speculator is not None else _NO_DRAFTS
        self.history.add(
            (
                begin_s,
                self._ended_s,
                num_context_tokens,
                num_decode_rows,
                drafts.num_draft_tokens,
                sum(drafts.accepted_at),
                scheduler.num_preemptions,
                self.num_generation_tokens,
            )
        )
        begin_s, self._kept_s = max(begin_s, self._kept_s), self._ended_s
        seconds = self._ended_s - begin_s
        self.accounts.charge_step(tokens, seconds)
        return seconds, num_context_tokens

    def stats(self, scheduler: Scheduler) -> EngineStats:
        """The gauges and totals as they are now."""
        self._look_at_memory()
        kv_cache, speculator = scheduler.kv_cache, scheduler.speculator
        drafts = speculator.totals if speculator is not None else _NO_DRAFTS
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_waiting_tokens=scheduler.waiting.num_tokens,
            num_blocks=kv_cache.num_blocks,
            num_used_blocks=kv_cache.num_used_blocks,
            block_size=kv_cache.block_size,
            max_num_seqs=scheduler.limits.max_num_seqs,
            num_context_seqs=sum(s.num_computed_tokens < s.num_prompt_tokens for s in scheduler.running),
            total_preemptions=scheduler.num_preemptions,
            total_steps=self._num_steps,
            total_queried_tokens=kv_cache.num_queried_tokens,
            total_hit_tokens=kv_cache.num_hit_tokens,
            total_prompt_tokens=self.num_prompt_tokens,
            total_generation_tokens=self.num_generation_tokens,
            total_drafts=drafts.num_drafts,
            total_draft_tokens=drafts.num_draft_tokens,
            total_accepted_tokens_at=drafts.accepted_at.copy(),
            total_draft_failures=speculator.num_failures if speculator is not None else 0,
            total_late_compiles=self._runner.num_late_compiles,
            num_paused=scheduler.waiting.num_paused,
            num_context_tokens=self._num_context_tokens if scheduler.running else 0,
            timestamp_s=self._timestamp_s,
            memory=self._memory,
        )

    def _look_at_memory(self) -> None:
        """Read the memory use, at most once a second because reading it costs too much for every step."""
        now_s = int(time.time())
        if now_s != self._timestamp_s:
            self._timestamp_s, self._memory = now_s, self._runner.memory_use()
