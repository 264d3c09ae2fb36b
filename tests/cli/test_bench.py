from __future__ import annotations

import argparse
from functools import partial

import pytest

from naiad.cli.bench import command, throughput
from naiad.errors import InternalError
from naiad.outputs import RequestOutput
from naiad.sequence import EngineRequest, FinishReason


class CountingEngine:
    """Generates the prompt's sum + position; `extra` is added in batches only."""

    def __init__(self, extra: int = 0, lost_tokens: int = 0, fails: bool = False) -> None:
        self.requests: list[EngineRequest] = []
        self._extra, self._lost_tokens, self._fails = extra, lost_tokens, fails
        self._live: list[EngineRequest] = []

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def add_request(self, request: EngineRequest) -> None:
        self.requests.append(request)
        self._live.append(request)

    def step(self) -> list[RequestOutput]:
        live, self._live = self._live, []
        if self._fails:
            return [
                RequestOutput(r.sequence_id, [], finish_reason=FinishReason.ERROR, error_message="NaN")
                for r in live
            ]
        extra = self._extra if len(live) > 1 else 0
        return [
            RequestOutput(
                r.sequence_id,
                [sum(r.prompt_token_ids) + i + extra for i in range(r.params.max_tokens - self._lost_tokens)],
                finish_reason=FinishReason.LENGTH,
            )
            for r in live
        ]


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(["throughput", *words])


def test_batches_are_a_list_of_numbers() -> None:
    assert parse("--batch", "1,8,32").batch == [1, 8, 32]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batch", "0"), "'0': expected whole numbers ≥ 1 with commas between them"),
        (("--batch", "a"), "'a': expected whole numbers ≥ 1 with commas between them"),
        (("--batch", "1,,2"), "'1,,2': expected whole numbers ≥ 1 with commas between them"),
        (("--prompt-tokens", "-1"), "'-1': expected a whole number ≥ 1"),
        (("--repeats", "x"), "'x': expected a whole number ≥ 1"),
    ],
)
def test_a_count_below_one_is_refused(
    words: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*words)
    assert message in capsys.readouterr().err


def test_tokens_come_in_the_order_of_the_prompts() -> None:
    generate = throughput.engine_generate(CountingEngine())

    assert generate([[1], [5]], 3) == [[1, 2, 3], [5, 6, 7]]


def test_a_missing_token_is_an_error() -> None:
    with pytest.raises(InternalError, match="made 2 tokens instead of 3"):
        throughput.engine_generate(CountingEngine(lost_tokens=1))([[1]], 3)


def test_a_failed_sequence_is_an_error() -> None:
    with pytest.raises(InternalError, match="NaN"):
        throughput.engine_generate(CountingEngine(fails=True))([[1]], 3)


def test_no_id_ends_a_sequence_early() -> None:
    engine = CountingEngine()
    throughput.engine_generate(engine)([[1]], 2)

    assert engine.requests[0].params.stop_token_ids == ()


def test_check_sees_tokens_that_depend_on_the_batch() -> None:
    prompts = [[1], [2], [3]]

    assert throughput.check(throughput.engine_generate(CountingEngine()), prompts)
    assert not throughput.check(throughput.engine_generate(CountingEngine(extra=1)), prompts)


def test_every_pass_has_prompts_of_its_own() -> None:
    engine = CountingEngine()
    work = throughput.Work(batch=2, prompt_tokens=8, output_tokens=4)
    make_prompts = partial(throughput.random_prompts, work, 1000)
    throughput.measure({"engine": throughput.engine_generate(engine)}, make_prompts, work, repeats=2)
    prompts = {tuple(request.prompt_token_ids) for request in engine.requests}

    assert len(prompts) == len(engine.requests)


def test_rates_tell_prefill_from_decode() -> None:
    timing = throughput.Timing(batch=2, prompt_tokens=100, output_tokens=11, first_token_s=0.5, total_s=1.5)

    assert timing.prefill_tokens_per_s == pytest.approx(400)
    assert timing.decode_tokens_per_s == pytest.approx(20)
    assert timing.output_tokens_per_s == pytest.approx(22 / 1.5)


def test_figures_have_the_promised_names() -> None:
    assert {"batch", "decode_tokens_per_s", "prefill_tokens_per_s"} <= throughput.figures(
        throughput.Timing(1, 1, 2, 1.0, 2.0)
    ).keys()


def test_contestants_take_turns_on_the_same_prompts() -> None:
    calls: list[tuple[str, list[list[int]], int]] = []
    work = throughput.Work(batch=1, prompt_tokens=4, output_tokens=3)
    contestants = {name: lambda prompts, n, name=name: calls.append((name, prompts, n)) for name in "ab"}
    throughput.measure(contestants, partial(throughput.random_prompts, work, 1000), work, repeats=2)

    timed = calls[2:]
    assert [(name, n) for name, _, n in timed] == [("a", 1), ("a", 3), ("b", 1), ("b", 3)] * 2
    assert timed[0][1] == timed[2][1] != timed[4][1]


def test_random_prompts_are_in_the_vocabulary() -> None:
    work = throughput.Work(batch=4, prompt_tokens=50, output_tokens=2)
    ids = [i for prompt in throughput.random_prompts(work, vocab_size=7, seed=1) for i in prompt]

    assert set(ids) == set(range(7))
