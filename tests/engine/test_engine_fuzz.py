"""Random requests of all kinds, aborts and deadlines on tiny pools: each sequence ends once and correctly."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.accounts import ExpectedAccounts
from helpers.engine_drive import EngineDrive, GuessingDrafter, solo_search, solo_tokens
from helpers.fake_draft_runner import FakeDraftRunner
from helpers.fake_runner import FakeRunner
from helpers.snapshots import check_snapshot
from naiad.config.engine_config import SCHEDULING_POLICIES
from naiad.engine import Engine
from naiad.engine.beam_groups import BeamGroups, beam_rules
from naiad.errors import InternalError
from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.kv_cache.kv_group import KVGroupSpec
from naiad.kv_cache.prefix_cache import PrefixCache, sha256
from naiad.outputs import RequestOutput
from naiad.sampling.beam_search import Beam
from naiad.scheduler.policies import make_policy
from naiad.sequence import BeamParams, EngineRequest, FinishReason, KVRetention, SamplingParams
from naiad.speculation.draft_slots import DraftSlots
from naiad.speculation.drafter import Drafter
from naiad.speculation.model_drafter import ModelDrafter

_WINDOWS: tuple[tuple[int | None, ...], ...] = ((None, 3), (None, 1, 6), (None, 11), (5,))


@dataclass(frozen=True)
class _Asked:
    """A sequence.

    Attributes:
        ids: those that end with it: its own, or all of a beam search.
        deadline_s: when it times out.
        states: the best beams of a search before each of its steps and at its end; no search: none.
    """

    prompt: list[int]
    params: SamplingParams
    ids: tuple[int, ...]
    deadline_s: float
    states: list[list[Beam]]
    is_first: bool


class _Fuzz:
    def __init__(self, rng: random.Random, overlaps: bool = False, has_windows: bool = False) -> None:
        self.rng = rng
        self.block_size = self.rng.choice((1, 2, 4))
        windows = self.rng.choice(_WINDOWS) if has_windows else (None,)
        groups = [KVGroupSpec(self.rng.randint(4, 16), window) for window in windows]
        # Few prefixes and a poor digest, so that blocks are shared and digests collide.
        digest = self.rng.choice((sha256, _poor_digest, None))
        # Steps overlap only if no drafter is configured.
        self.kinds = ("nobody",) * 5 * overlaps + ("guesses", "draft model", "first layers")
        if windows[0] is not None:
            # A draft model's layers need a group with full attention.
            self.kinds = tuple(kind for kind in self.kinds if kind != "draft model")
        self.error_rate = self.rng.choice((0.0, 0.2, 0.9))
        self.drafter: Drafter | None = None
        self.drive = EngineDrive(
            num_blocks=groups,
            block_size=self.block_size,
            max_num_seqs=self.rng.randint(1, 8),
            budget=self.rng.choice((1, 2, 3, 5, 8, 16, 64)),
            prefix_cache=PrefixCache(self.block_size, digest, windows) if digest else None,
            policy=make_policy(self.rng.choice(SCHEDULING_POLICIES), aging_s=1.0),
            make_drafter=self._make_drafter if self.rng.random() < 0.6 else None,
            num_speculative_tokens=self.rng.randint(1, 16),
            overlaps=overlaps,
            # Drafts for which there are blocks may then be too dear for what is left of a step.
            context_cost=self.rng.choice((0.0, 0.05)),
        )
        self.prefixes = [[self.rng.randrange(50) for _ in range(12)] for _ in range(3)]
        self.asked: dict[int, _Asked] = {}
        self.aborted: set[int] = set()
        self.num_searches = self.num_described = self.num_early = 0
        self.accounts = ExpectedAccounts(self.drive)

    def _make_drafter(self, kv_cache: KVCacheManager, target: FakeRunner) -> Drafter | None:
        kind = self.rng.choice(self.kinds)
        if kind == "nobody":
            return None
        if kind == "guesses":
            self.drafter = GuessingDrafter(self.rng, self.error_rate)
            return self.drafter
        failure_rate = self.rng.choice((0.0, 0.0, 0.05))
        has_own_kv = kind == "draft model"
        runner = FakeDraftRunner(
            kv_cache, None if has_own_kv else target, self.rng, self.error_rate, failure_rate
        )
        slots = DraftSlots(kv_cache) if has_own_kv else None
        self.drafter = ModelDrafter(
            runner, kv_cache, slots, max_caught_up_tokens=self.rng.choice((1, 7, 256))
        )
        return self.drafter

    def run(self, num_operations: int) -> None:
        for number in range(num_operations):
            roll = self.rng.random()
            if roll < 0.25:
                self._add()
            elif roll < 0.30 and self.asked:
                self._abort(self.rng.choice(list(self.asked)))
            elif roll < 0.31 and self.asked:
                self.drive.runner.failing.add(self.rng.choice(list(self.asked)))
            else:
                self.accounts.pass_time(0.1)
                self.drive.step()
            if number % 10 == 0:
                check_snapshot(self.drive)
        while self.drive.engine.has_work:
            self.accounts.pass_time(0.1)
            self.drive.step()
        check_snapshot(self.drive)

    def _abort(self, sequence_id: int) -> None:
        if sequence_id not in self.drive.finals:
            self.aborted.add(sequence_id)
        self.drive.abort(sequence_id)

    def _add(self) -> None:
        # If all groups have windows, a sequence may have any length.
        longest = min(self.drive.engine.max_model_len - 1, 63)
        num_tokens = self.rng.randint(1, longest)
        beginning = self.rng.choice(self.prefixes)[: self.rng.randint(0, num_tokens)]
        prompt = beginning + [self.rng.randrange(50) for _ in range(num_tokens - len(beginning))]
        params = SamplingParams(
            max_tokens=self.rng.randint(1, 30),
            stop_token_ids=tuple(self.rng.sample(range(50), 1)) if self.rng.random() < 0.5 else (),
            priority=self.rng.choice((0, 0, 0, -2, 3)),
            num_draft_tokens=self.rng.choice((-1, -1, 0, 2)),
            repetition_penalty=self.rng.choice((1.0,) * 19 + (1.1,)),
            num_prompt_log_probs=1 if len(self.asked) % 8 == 3 else -1,
        )
        sequence_id = len(self.asked)
        sibling_ids = tuple(range(sequence_id + 1, sequence_id + self.rng.choice((1, 1, 1, 2, 4))))
        beam = self._beam(prompt, params, 1 + len(sibling_ids))
        ids = (sequence_id, *sibling_ids)
        states: list[list[Beam]] = []
        if beam is not None:
            request = EngineRequest(
                sequence_id=sequence_id,
                prompt_token_ids=prompt,
                params=params,
                sibling_ids=sibling_ids,
                beam=beam,
            )
            states = solo_search(prompt, beam_rules(request))
        timeout_s = self.rng.uniform(0.0, 5.0) if self.rng.random() < 0.2 else None
        deadline_s = math.inf if timeout_s is None else self.drive.now + timeout_s
        for each in ids:
            of_end = ids if states else (each,)
            self.asked[each] = _Asked(prompt, params, of_end, deadline_s, states, each == sequence_id)
        self.drive.add(
            sequence_id,
            prompt,
            params,
            timeout_s=timeout_s,
            cache_salt=self.rng.choice(("", "", "a", "b")),
            sibling_ids=sibling_ids,
            beam=beam,
            retention=self._retention() if self.rng.random() < 0.3 else None,
            draft_token_ids=self._offer(prompt, params) if beam is None and self.rng.random() < 0.2 else (),
        )

    def _offer(self, prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
        """A client's guess at the first tokens."""
        right = solo_tokens(prompt, min(params.max_tokens, self.rng.randint(1, 5)))
        return tuple(each if self.rng.random() >= self.error_rate else 49 for each in right)

    def _retention(self) -> KVRetention:
        start = self.rng.randint(0, 20)
        end = start + self.rng.choice((1, 16, 1000))
        duration_s = self.rng.choice((math.inf, 0.3, 5.0))
        return KVRetention(ranges=((start, end, self.rng.choice((0, 50, 100)), duration_s),))

    def _beam(self, prompt: list[int], params: SamplingParams, width: int) -> BeamParams | None:
        """Parameters of a search, if this width is allowed."""
        limits = self.drive.scheduler.limits
        num_tokens = len(prompt) + params.max_tokens
        fits = width <= limits.max_num_seqs and all(
            width * group.num_blocks_for_all(num_tokens) <= group.pool.num_blocks
            for group in self.drive.scheduler.kv_cache.groups
        )
        if width == 1 or not fits or self.rng.random() < 0.5:
            return None
        self.num_searches += 1
        return BeamParams(length_penalty=self.rng.choice((0.0, 1.0)), stops_early=self.rng.random() < 0.5)

    def check(self) -> None:
        drive = self.drive
        assert drive.finals.keys() == self.asked.keys()
        assert drive.engine.stats().num_used_blocks == 0
        assert not drive.scheduler.leaving
        assert not drive.runner.under_way
        self.accounts.check()
        if isinstance(self.drafter, GuessingDrafter):
            assert not self.drafter.live
        for sequence_id, asked in self.asked.items():
            self._check_early_end(sequence_id, asked)
            self._check_tokens(sequence_id, asked)
            self._check_prompt(sequence_id, asked)

    def _check_prompt(self, sequence_id: int, asked: _Asked) -> None:
        found = self.drive.prompt_log_probs.get(sequence_id)
        has_ended = self.drive.reason(sequence_id) in (FinishReason.STOP, FinishReason.LENGTH)
        is_asked = asked.params.num_prompt_log_probs >= 0 and asked.is_first and not asked.states
        if is_asked and len(asked.prompt) > 1 and (found or has_ended):
            assert found == list(enumerate(asked.prompt))[1:]
            self.num_described += 1
        else:
            assert found is None

    def _check_early_end(self, sequence_id: int, asked: _Asked) -> None:
        """A sequence ends early only for a reason that somebody gave."""
        reason, ids = self.drive.reason(sequence_id), set(asked.ids)
        if reason is FinishReason.CANCELLED:
            assert ids & self.aborted, "nobody has aborted it"
        elif reason is FinishReason.ERROR:
            assert ids & self.drive.runner.failing, "no row of it has failed"
        elif reason is FinishReason.TIMEOUT:
            assert self.drive.ended_s[sequence_id] >= asked.deadline_s, "its deadline has not passed"
        self.num_early += reason not in (FinishReason.STOP, FinishReason.LENGTH)

    def _check_beams(self, asked: _Asked) -> None:
        found = [self.drive.tokens[each] for each in asked.ids]
        states = [
            [list(beam.token_ids[: len(beam.token_ids) - beam.is_stopped]) for beam in state]
            for state in asked.states
        ]
        reason = self.drive.reason(asked.ids[0])
        if reason is FinishReason.ERROR:
            states = [[]]
        elif reason in (FinishReason.STOP, FinishReason.LENGTH):
            states = states[-1:]
        assert found in [state + [[]] * (len(found) - len(state)) for state in states], "other beams"

    def _check_tokens(self, sequence_id: int, asked: _Asked) -> None:
        if asked.states:
            self._check_beams(asked)
            return
        tokens, reason = self.drive.tokens[sequence_id], self.drive.reason(sequence_id)
        room = self.drive.engine.max_model_len - len(asked.prompt)
        most = min(asked.params.max_tokens, room)
        expected = solo_tokens(asked.prompt, most)
        stops = [index for index, token_id in enumerate(expected) if token_id in asked.params.stop_token_ids]
        if reason is FinishReason.STOP:
            assert tokens == expected[: stops[0]]
        elif reason is FinishReason.LENGTH:
            assert not stops
            assert tokens == expected
        else:
            assert tokens == expected[: len(tokens)]


def _poor_digest(parent_digest: bytes, token_bytes: bytes) -> bytes:
    return bytes([sum(parent_digest + token_bytes) % 7])


def _fuzz(seeds: range, num_operations: int, overlaps: bool, has_windows: bool = False) -> Counter[str]:
    """Run all seeds; return totals, which show that the tested events happened."""
    totals: Counter[str] = Counter()
    for seed in seeds:
        fuzz = _Fuzz(random.Random(seed), overlaps, has_windows)
        fuzz.run(num_operations)
        fuzz.check()
        stats = fuzz.drive.engine.stats()
        totals["preemptions"] += stats.total_preemptions
        totals["cached tokens"] += stats.total_hit_tokens
        totals["forks"] += fuzz.drive.runner.num_copied_blocks
        totals["searches"] += fuzz.num_searches
        totals["described prompts"] += fuzz.num_described
        totals["early ends"] += fuzz.num_early
        totals["drafts"] += stats.total_drafts
        totals["accepted"] += sum(stats.total_accepted_tokens_at)
        if overlaps:
            totals["overlapped steps"] += fuzz.drive.runner.num_overlapped
            totals["late ends"] += fuzz.drive.scheduler.num_late_ends
        else:
            totals["draft failures"] += stats.total_draft_failures
    return totals


@pytest.mark.parametrize(("num_seeds", "fewest", "overlaps"), [(220, 50, False), (80, 20, True)])
def test_random_operations(num_seeds: int, fewest: int, overlaps: bool) -> None:
    totals = _fuzz(range(num_seeds), 150, overlaps)
    assert min(totals.values()) > fewest, totals


@pytest.mark.parametrize(("num_seeds", "fewest", "overlaps"), [(150, 50, False), (80, 20, True)])
def test_random_operations_with_windows(num_seeds: int, fewest: int, overlaps: bool) -> None:
    """As with Gemma: groups with windows, with or without a group with full attention."""
    totals = _fuzz(range(num_seeds), 150, overlaps, has_windows=True)
    assert min(totals.values()) > fewest, totals


def _end_one(engine: Engine, reason: FinishReason) -> list[RequestOutput]:
    """End a sequence for which nobody has given a reason."""
    sequence = engine._scheduler.running[0]
    if sequence.sequence_id in engine._beams:
        if reason is FinishReason.ERROR:
            return engine._beams.fail(sequence.sequence_id, InternalError("of nothing"))
        return engine._beams.end(sequence.sequence_id, reason)
    live = engine._live[sequence.sequence_id]
    is_error = reason is FinishReason.ERROR
    return [engine._fail(live, InternalError("of nothing")) if is_error else engine._finish(live, reason)]


@pytest.mark.parametrize(
    ("reason", "problem"),
    [
        (FinishReason.CANCELLED, "nobody has aborted it"),
        (FinishReason.TIMEOUT, "its deadline has not passed"),
        (FinishReason.ERROR, "no row of it has failed"),
    ],
)
def test_an_end_for_no_reason_is_found(
    monkeypatch: pytest.MonkeyPatch, reason: FinishReason, problem: str
) -> None:
    """The engine ends a running sequence now and then."""
    step, num_steps = Engine.step, itertools.count(1)

    def step_and_end(self: Engine) -> list[RequestOutput]:
        outputs = step(self)
        is_due = next(num_steps) % 40 == 0 and self._scheduler.running
        return outputs + (_end_one(self, reason) if is_due else [])

    monkeypatch.setattr(Engine, "step", step_and_end)
    with pytest.raises(AssertionError, match=problem):
        _fuzz(range(20), 150, overlaps=False)


def test_a_search_that_ends_early_with_other_beams_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    end = BeamGroups.end

    def end_wrongly(self: BeamGroups, sequence_id: int, reason: FinishReason) -> list[RequestOutput]:
        first, *others = end(self, sequence_id, reason)
        return [msgspec.structs.replace(first, token_ids=[*first.token_ids, 7]), *others]

    monkeypatch.setattr(BeamGroups, "end", end_wrongly)
    with pytest.raises(AssertionError, match="other beams"):
        _fuzz(range(20), 150, overlaps=False)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_operations_that_hypothesis_draws(rng: random.Random, overlaps: bool, has_windows: bool) -> None:
    fuzz = _Fuzz(rng, overlaps, has_windows)
    fuzz.run(40)
    fuzz.check()


@pytest.mark.slow
@pytest.mark.parametrize("has_windows", [False, True])
@pytest.mark.parametrize("overlaps", [False, True])
def test_many_random_operations(overlaps: bool, has_windows: bool) -> None:
    totals = _fuzz(range(1000, 2000), 600, overlaps, has_windows)
    assert min(totals.values()) > 250, totals
