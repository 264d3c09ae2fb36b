"""An engine with `FakeRunner`, a clock that tests set, and the expected tokens of a single request."""

from __future__ import annotations

import random
from collections.abc import Callable

from helpers.fake_runner import FakeRunner, next_candidates, next_token
from helpers.invariants import check_invariants
from naiad.engine import Engine
from naiad.engine.live_sequence import TextState
from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.kv_cache.kv_group import KVGroupSpec
from naiad.kv_cache.prefix_cache import PrefixCache
from naiad.outputs import RequestOutput, StepBatch
from naiad.sampling.beam_search import Beam, BeamRules, BeamSearch
from naiad.scheduler.policies import SchedulingPolicy
from naiad.scheduler.scheduler import Scheduler
from naiad.scheduler.step_budget import SchedulerLimits
from naiad.sequence import (
    BeamParams,
    EngineRequest,
    FinishReason,
    KVRetention,
    SamplingParams,
    Sequence,
    TextContext,
)
from naiad.speculation.drafter import Drafter, TextDrafter
from naiad.speculation.policy import SpeculationPolicy
from naiad.speculation.speculator import Speculator
from naiad.speculation.step_cost import StepCost


class CheckedScheduler(Scheduler):
    """Checks the invariants of each step before it is computed.

    Attributes:
        num_late_ends: number of sequences that a step computed although they had ended.
    """

    num_late_ends = 0

    def release(self, sequence_id: int) -> None:
        self.num_late_ends += sequence_id in self.leaving
        super().release(sequence_id)

    def schedule(self) -> StepBatch:
        step = super().schedule()
        check_invariants(self, step)
        return step

    def schedule_projected(self) -> StepBatch | None:
        step = super().schedule_projected()
        if step is not None:
            check_invariants(self, step)
        return step


class EngineDrive:
    """Runs an engine step by step, checks the invariants, and collects outputs.

    Attributes:
        now: the engine's time in seconds.
        tokens: sequence id → ids sent so far.
        finals: sequence id → its last output.
        ended_s: sequence id → when it came.
        prompt_log_probs: sequence id → (position, id) of each prompt token that is described.
    """

    def __init__(
        self,
        num_blocks: int | list[KVGroupSpec] = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        budget: int = 64,
        text_state: Callable[[TextContext], TextState] | None = None,
        prefix_cache: PrefixCache | None = None,
        policy: SchedulingPolicy | None = None,
        make_drafter: Callable[[KVCacheManager, FakeRunner], Drafter | None] | None = None,
        num_speculative_tokens: int = 4,
        overlaps: bool = False,
        target_first_token_s: float = 0.0,
        context_cost: float = 0.0,
    ) -> None:
        self.now = 0.0
        self.tokens: dict[int, list[int]] = {}
        self.finals: dict[int, RequestOutput] = {}
        self.ended_s: dict[int, float] = {}
        self.prompt_log_probs: dict[int, list[tuple[int, int]]] = {}
        self.runner = FakeRunner(num_blocks, block_size)
        max_step_tokens = max(budget, max_num_seqs)
        kv_cache = KVCacheManager(
            num_blocks, block_size, prefix_cache, lambda: self.now, max_step_tokens=max_step_tokens
        )
        speculator = None
        if make_drafter is not None:
            drafter = make_drafter(kv_cache, self.runner)
            # All steps cost the same, so all drafts are tried.
            policy_of_drafts = SpeculationPolicy(StepCost([(1, 1.0), (1000, 1.0)]))
            speculator = Speculator(drafter, policy_of_drafts, num_speculative_tokens)
        limits = SchedulerLimits(max_num_seqs, budget, context_cost)
        self.scheduler = CheckedScheduler(kv_cache, limits, policy, speculator)
        self.engine = Engine(
            self.scheduler,
            self.runner,
            text_state,
            clock=lambda: self.now,
            overlaps=overlaps,
            target_first_token_s=target_first_token_s,
        )

    def add(
        self,
        sequence_id: int,
        prompt: list[int],
        params: SamplingParams | None = None,
        text: TextContext | None = None,
        timeout_s: float | None = None,
        cache_salt: str = "",
        sibling_ids: tuple[int, ...] = (),
        beam: BeamParams | None = None,
        retention: KVRetention | None = None,
        draft_token_ids: tuple[int, ...] = (),
        tenant: str | None = None,
    ) -> None:
        self.engine.add_request(
            EngineRequest(
                sequence_id=sequence_id,
                prompt_token_ids=prompt,
                params=params or SamplingParams(max_tokens=5),
                text=text,
                timeout_s=timeout_s,
                cache_salt=cache_salt,
                tenant=tenant,
                sibling_ids=sibling_ids,
                beam=beam,
                retention=retention,
                draft_token_ids=draft_token_ids,
            )
        )
        for each in (sequence_id, *sibling_ids):
            self.tokens[each] = []
        self.now += 1e-6

    def abort(self, sequence_id: int) -> None:
        output = self.engine.abort(sequence_id)
        check_invariants(self.scheduler)
        if output is not None:
            self._collect(output)

    def step(self) -> list[RequestOutput]:
        outputs = self.engine.step()
        check_invariants(self.scheduler)
        for output in outputs:
            self._collect(output)
        return outputs

    def run(self, max_steps: int = 100_000) -> None:
        """Step until all have ended."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("the engine does not finish")

    def reason(self, sequence_id: int) -> FinishReason | None:
        return self.finals[sequence_id].finish_reason

    def _collect(self, output: RequestOutput) -> None:
        assert output.sequence_id not in self.finals, "an output after the last"
        self.tokens[output.sequence_id] += output.token_ids
        if output.prompt_log_probs:
            assert output.sequence_id not in self.prompt_log_probs, "a prompt is described twice"
            # What the fake runner puts into them.
            self.prompt_log_probs[output.sequence_id] = [
                (round(-each.log_prob), *each.top_token_ids) for each in output.prompt_log_probs
            ]
        if output.finish_reason is not None:
            self.finals[output.sequence_id] = output
            self.ended_s[output.sequence_id] = self.now


def solo_tokens(prompt: list[int], num_tokens: int) -> list[int]:
    """The tokens that the fake model generates after `prompt`, computed without an engine."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def solo_beams(prompt: list[int], rules: BeamRules) -> list[Beam]:
    """The beams of a search after `prompt`, computed without an engine."""
    return solo_search(prompt, rules)[-1]


def solo_search(prompt: list[int], rules: BeamRules) -> list[list[Beam]]:
    """The best beams so far before each step of a search after `prompt`, and at last those of its end."""
    search = BeamSearch(rules)
    states = []
    is_over = False
    while not is_over:
        states.append(search.best_so_far())
        rows = [next_candidates([*prompt, *beam.token_ids], rules.num_candidates) for beam in search.running]
        is_over = search.advance(rows) is None
    return [*states, search.best()]


class GuessingDrafter(TextDrafter):
    """Drafts what the fake model would generate, with occasional errors."""

    def __init__(self, rng: random.Random, error_rate: float) -> None:
        self._rng = rng
        self._error_rate = error_rate
        self.live: set[int] = set()

    def guess(self, sequence: Sequence, num_tokens: int) -> list[int]:
        self.live.add(sequence.sequence_id)
        text = list(sequence.token_ids)
        for _ in range(self._rng.randint(0, num_tokens)):
            is_wrong = self._rng.random() < self._error_rate
            text.append(self._rng.randrange(50) if is_wrong else next_token(text))
        return text[sequence.num_tokens :]

    def num_read(self, sequence: Sequence) -> int:
        return sequence.num_tokens

    def forget(self, sequence: Sequence) -> None:
        self.live.discard(sequence.sequence_id)
