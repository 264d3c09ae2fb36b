"""Random mixes of requests through all doors: each gets what it gets alone, and exactly one FINAL.

In some the engine is lost as by SIGKILL: what was running ends with an error; the next one serves the rest.

`--mixes N` runs so many, `--first-mix N` begins elsewhere. A mix that fails is printed as short as it can be,
as Python for `run_mix`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from helpers.mixes.drawn import Asked, Door, Ending, Mix, Settings, drawn_mix, labels, served_fields
from helpers.mixes.replies import Meets, Reply, check_reply
from helpers.mixes.shrink import as_source, shrunk
from helpers.mixes.stage import Bench, Stage, run_mix
from naiad.engine_process.clients.attached_client import AttachedClient
from naiad.engine_process.serving.loop import EngineLoop
from naiad.errors import EngineLostError
from naiad.kv_cache.kv_cache_manager import KVCacheManager
from naiad.model_runner import ModelRunner
from naiad.outputs import ModelOutput, RequestOutput, StepBatch
from naiad.sequence import FinishReason, Sequence

_MIXES_OF_A_TEST = 50
# Injected bugs are found within so many mixes.
_MIXES_OF_A_CONTROL = 40


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        first, count = metafunc.config.option.first_mix, metafunc.config.option.mixes
        begins = range(first, first + count, _MIXES_OF_A_TEST)
        parts = [range(each, min(each + _MIXES_OF_A_TEST, first + count)) for each in begins]
        metafunc.parametrize("seeds", parts, ids=[f"{each.start}-{each.stop - 1}" for each in parts])


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("mixes"))
    yield made
    made.close()


def problem_of(bench: Bench, mix: Mix) -> str:
    """What is wrong with a mix; "" if nothing is."""
    try:
        run_mix(bench, mix)
    except Exception as error:  # noqa: BLE001 — whatever is wrong
        return f"{type(error).__name__}: {error}"
    return ""


def check(bench: Bench, seed: int) -> Stage:
    """Run a mix; if it fails, so does the test, with the shortest mix that fails."""
    mix = drawn_mix(seed)
    try:
        return run_mix(bench, mix)
    except Exception as error:  # noqa: BLE001 — whatever is wrong
        shortest = shrunk(mix, lambda each: bool(problem_of(bench, each)))
        problem = problem_of(bench, shortest)
        pytest.fail(f"mix {seed}: {error}\n\nThe shortest: {as_source(shortest)}\n{problem}")


def test_each_request_gets_what_it_gets_alone(bench: Bench, seeds: range) -> None:
    totals: Counter[str] = Counter()
    for seed in seeds:
        stage = check(bench, seed)
        totals += _events(stage)
    print(dict(totals))
    if len(seeds) == _MIXES_OF_A_TEST:
        assert min(totals[each] for each in _EVENTS) > 0, totals


_EVENTS = (
    *("preemptions", "cached tokens", "accepted drafts", "refused", "several rows"),
    *("finished", "cancelled", "late", "early in the middle"),
    *("kills", "met by a loss", "lost"),
)


def _events(stage: Stage) -> Counter[str]:
    """What has happened in a mix, so that a test shows that it tests something."""
    stats = stage.engine.stats()
    totals = Counter(
        {
            "preemptions": stats.total_preemptions,
            "cached tokens": stats.total_hit_tokens,
            "accepted drafts": sum(stats.total_accepted_tokens_at),
            "kills": stage.num_kills,
            "met by a loss": sum(each is Meets.LOSS for each in stage.meets.values()),
        }
    )
    for reply in stage.replies:
        answers = reply.answers()
        reasons = {str(each.get("finish_reason", [""])[0]) for each in answers.values()}
        totals["refused"] += bool(reply.errors) and reply.errors[0][0] in ("INVALID_ARG", 400)
        totals["lost"] += bool(reply.errors) and "the engine process ended" in reply.errors[0][1]
        totals["late"] += bool(reply.errors) and "timeout" in reply.errors[0][1]
        totals["cancelled"] += "cancelled" in reasons or any(each[0] == "CANCELLED" for each in reply.errors)
        totals["early in the middle"] += not reasons.isdisjoint(("cancelled", "timeout"))
        totals["finished"] += not reasons.isdisjoint(("stop", "length"))
        totals["several rows"] += len({row for row, _ in answers}) > 1
    return totals


def test_every_field_of_every_door_is_drawn() -> None:
    covered = set().union(*(labels(drawn_mix(seed)) for seed in range(400)))
    wanted = {f"{door.name} {name}" for door, names in served_fields().items() for name in names}
    wanted |= {f"{door.name} {ending.name}" for door in Door for ending in Ending}
    assert wanted - covered == set()


def test_a_mix_is_drawn_and_runs_the_same_each_time(bench: Bench) -> None:
    killed = next(seed for seed in itertools.count() if drawn_mix(seed).kill is not None)
    for seed in (3, killed):
        assert drawn_mix(seed) == drawn_mix(seed)
        first, second = (run_mix(bench, drawn_mix(seed)) for _ in range(2))
        assert first.replies == second.replies
        assert first.num_ticks == second.num_ticks


def shortest_failure(bench: Bench) -> Mix:
    """The shortest form of the first mix that fails."""
    for seed in range(_MIXES_OF_A_CONTROL):
        mix = drawn_mix(seed)
        if problem_of(bench, mix):
            return shrunk(mix, lambda each: bool(problem_of(bench, each)))
    raise AssertionError("nothing fails")


def test_a_wrong_token_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second row of a step gets another token now and then."""
    launch = ModelRunner.launch

    def launch_wrongly(self: ModelRunner, step: StepBatch) -> Callable[[], ModelOutput]:
        wait = launch(self, step)

        def wait_wrongly() -> ModelOutput:
            result = wait()
            for row in step.rows[1:2]:
                ids = result.sampled_token_ids.get(row.sequence_id, [])
                if row.start % 5 == 4 and ids:
                    ids[-1] = (ids[-1] + 1) % 97
            return result

        return wait_wrongly

    monkeypatch.setattr(ModelRunner, "launch", launch_wrongly)
    shortest = shortest_failure(bench)
    assert len(shortest.requests) <= 2
    assert sum(len(asked.rows) for asked in shortest.requests) == 2
    assert shortest.settings.num_blocks == 64
    assert not any(asked.may_end_early for asked in shortest.requests)


def test_a_swallowed_final_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's process forgets to tell that a deadline has passed."""
    route = EngineLoop._route

    def route_some(self: EngineLoop, output: RequestOutput) -> None:
        if output.finish_reason is FinishReason.TIMEOUT:
            self._forget(*self._sequences[output.sequence_id])
        else:
            route(self, output)

    monkeypatch.setattr(EngineLoop, "_route", route_some)
    (asked,) = shortest_failure(bench).requests
    assert asked.timeout_us
    assert asked.ending is None


def test_a_swallowed_final_at_a_loss_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client forgets what the engine had when it was lost."""
    lose = AttachedClient._lose

    def lose_silently(self: AttachedClient, engine: Any) -> None:
        engine.outstanding.clear()
        lose(self, engine)

    monkeypatch.setattr(AttachedClient, "_lose", lose_silently)
    shortest = shortest_failure(bench)
    assert shortest.kill is not None
    (asked,) = shortest.requests
    assert not asked.may_end_early


_LOST = ("INTERNAL", str(EngineLostError()))


@pytest.mark.parametrize(
    ("token_ids", "error", "meets"),
    [
        ([7, 9], _LOST, Meets.LOSS),  # other tokens
        ([7], ("CANCELLED", _LOST[1]), Meets.LOSS),  # another error
        ([7], _LOST, Meets.ENGINE),  # it came after the loss
        ([7], None, Meets.LOSS),  # it just ends
    ],
)
def test_a_wrong_end_at_a_loss_is_found(
    token_ids: list[int], error: tuple[str, str] | None, meets: Meets
) -> None:
    """Without an engine."""
    asked = Asked(0, Door.LLM, ({"input_ids": [5], "max_tokens": 3, "seed": 1},))
    alone = Reply([{"output_ids": [7, 8, 9], "finish_reason": ["length"]}], num_finals=1)
    check_reply(asked, Reply([{"output_ids": [7, 8]}], [_LOST], num_finals=1), alone, Meets.LOSS)
    found = Reply([{"output_ids": token_ids}], [error] if error else [], num_finals=1)
    with pytest.raises(AssertionError):
        check_reply(asked, found, alone, meets)


_TIMEOUT = ("UNAVAILABLE", "timeout: the request was not started within its time limit")
_LEAVES, _IS_LATE = {"ending": Ending.LEAVES}, {"timeout_us": 30_000}
_NEVER_LATE = {"timeout_us": 600_000_000}


@pytest.mark.parametrize(
    ("how", "answer", "error", "is_right"),
    [
        (_LEAVES, {"output_ids": [7], "finish_reason": ["cancelled"]}, None, True),
        (_LEAVES, {"output_ids": [7], "finish_reason": ["timeout"]}, None, False),
        (_LEAVES, {"output_ids": [7], "finish_reason": ["length"]}, None, False),
        (_LEAVES, {"output_ids": [7]}, ("CANCELLED", "Request was cancelled"), True),
        (_LEAVES, {"output_ids": [7]}, ("CANCELLED", "anything"), False),
        (_LEAVES, {}, _TIMEOUT, False),
        (_IS_LATE, {"output_ids": [7], "finish_reason": ["timeout"]}, None, True),
        (_IS_LATE, {"output_ids": [7], "finish_reason": ["cancelled"]}, None, False),
        (_IS_LATE, {}, _TIMEOUT, True),
        (_IS_LATE, {}, ("UNAVAILABLE", "anything"), False),
        (_NEVER_LATE, {"output_ids": [7], "finish_reason": ["timeout"]}, None, False),
        (_NEVER_LATE, {}, _TIMEOUT, False),
    ],
)
def test_a_wrong_early_end_is_found(
    how: dict[str, Any], answer: dict[str, Any], error: tuple[str, str] | None, is_right: bool
) -> None:
    """Without an engine."""
    asked = Asked(0, Door.LLM, ({"input_ids": [5], "max_tokens": 3, "seed": 1},), **how)
    alone = Reply([{"output_ids": [7, 8, 9], "finish_reason": ["length"]}], num_finals=1)
    found = Reply([answer] if answer else [], [error] if error else [], num_finals=1)
    with nullcontext() if is_right else pytest.raises(AssertionError):
        check_reply(asked, found, alone)


@pytest.mark.parametrize(
    ("token_ids", "is_right"),
    [
        ([7], True),
        ([7, 8, 9, 4], True),  # held back, and part of the stop string when nobody leaves
        ([7, 1], False),
        ([7, 1, 9, 4], False),
        ([7, 8, 9, *[4] * 9], False),  # more than a stop string has bytes
    ],
)
def test_wrong_ids_of_an_early_end_with_stop_strings_are_found(token_ids: list[int], is_right: bool) -> None:
    """Without an engine."""
    row = {"input_ids": [5], "max_tokens": 9, "seed": 1, "stop_words": ["stop"]}
    asked = Asked(0, Door.LLM, (row,), ending=Ending.LEAVES)
    alone = Reply([{"output_ids": [7, 8, 9], "finish_reason": ["stop"]}], num_finals=1)
    found = Reply([{"output_ids": token_ids, "finish_reason": ["cancelled"]}], num_finals=1)
    with nullcontext() if is_right else pytest.raises(AssertionError, match="no beginning"):
        check_reply(asked, found, alone)


@pytest.mark.parametrize(("token_ids", "is_right"), [([], True), ([7, 8], True), ([7, 1], False)])
def test_rows_of_a_request_that_ends_before_another_row_is_refused(
    token_ids: list[int], is_right: bool
) -> None:
    """Without an engine."""
    rows: tuple[dict[str, Any], ...] = ({"input_ids": [5], "seed": 1}, {"input_ids": [6], "seed": 2})
    asked = Asked(0, Door.LLM, rows, timeout_us=30_000)
    refused = Reply(errors=[("INVALID_ARG", "no token is possible for this request")], num_finals=1)
    row = Reply([{"output_ids": [7, 8, 9], "finish_reason": ["length"]}], num_finals=1)
    responses = [
        {"output_ids": ids, "finish_reason": ["timeout"], "batch_index": [index]}
        for index, ids in enumerate((token_ids, []))
    ]
    found = Reply(responses, num_finals=1)
    assert found.answers().keys() == {(0, 0), (1, 0)}
    with nullcontext() if is_right else pytest.raises(AssertionError, match="no beginning"):
        check_reply(asked, found, refused, row_alone=lambda number: (row, refused)[number])


def test_a_lost_block_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a sequence that was preempted are not freed."""
    free = KVCacheManager.free

    def free_some(self: KVCacheManager, sequence: Sequence) -> None:
        if sequence.num_preemptions == 0:
            free(self, sequence)

    monkeypatch.setattr(KVCacheManager, "free", free_some)
    shortest = shortest_failure(bench)
    assert len(shortest.requests) <= 3
    # One sequence alone is preempted for nobody.
    assert sum(len(asked.rows) for asked in shortest.requests) >= 2


def test_shrinking_keeps_what_makes_a_mix_fail() -> None:
    """Without an engine: a mix fails if two doors meet and one request has a seed below 256."""

    def fails(mix: Mix) -> bool:
        doors = {asked.door for asked in mix.requests}
        seeds = [row.get("seed", 999) for asked in mix.requests for row in asked.rows]
        return len(doors) >= 2 and min(seeds) < 256

    for seed in itertools.islice((each for each in range(99) if fails(drawn_mix(each))), 10):
        shortest = shrunk(drawn_mix(seed), fails)
        assert fails(shortest)
        assert len(shortest.requests) == 2
        assert shortest.settings == Settings()
        assert shortest.kill is None
        assert sum(len(asked.rows) for asked in shortest.requests) == 2
