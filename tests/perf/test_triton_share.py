from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from perf.server.each_token_row import EachTokenRow
from perf.server.fast_engine import FastEngine
from perf.server.processor_time import GATE, LOAD, OTHERS, REST, kind_of, medians, row_of
from perf.server.triton_share import Turn, calm, rows, take_turn

from naiad.cli.bench.throughput import Prompts, Work
from naiad.config import ModelConfig
from naiad.outputs import RequestOutput
from naiad.sequence import EngineRequest, FinishReason, SamplingParams


def test_a_share_is_the_median_over_turns_of_what_lies_between_two_passes_of_the_engine() -> None:
    turns = [
        Turn([100.0, 100.0, 100.0], {"llm": 80.0, "ensemble": 70.0}),
        Turn([100.0, 50.0, 50.0], {"llm": 37.5, "ensemble": 40.0}),  # others used the machine
        Turn([100.0, 100.0, 60.0], {"llm": 100.0, "ensemble": 72.0}, stolen=0.1),
    ]

    engine, llm, ensemble = rows(turns)

    assert (engine["of the engine"], engine["all new tokens/s"]) == (1.0, 86.7)
    assert (llm["of the engine"], llm["turns"]) == (0.8, "0.80 0.50 1.00")
    assert (ensemble["of the engine"], ensemble["all new tokens/s"]) == (0.8, 70.0)


def test_turns_in_which_the_host_took_the_processor_away_do_not_count() -> None:
    turns = [Turn([1.0, 1.0], {"llm": 1.0}, stolen) for stolen in (0.0, 0.3, 0.05)]

    assert calm(turns, 0.05) == [turns[0], turns[2]]


def test_in_a_turn_the_engine_runs_before_and_after_each_model() -> None:
    order = []

    def contestant(name: str) -> Callable[[Prompts, int], list[Any]]:
        def generate(prompts: Prompts, num_tokens: int) -> list[Any]:
            order.append((name, prompts[0][0], num_tokens))
            return []

        return generate

    contestants = {name: contestant(name) for name in ("engine", "text", "llm")}
    turn = take_turn(contestants, lambda seed: [[hash(seed)]], Work(4, 1, 10), number=3)

    assert [name for name, _, _ in order] == ["engine", "text", "engine", "llm", "engine"]
    assert len({prompt for _, prompt, _ in order}) == len(order)
    assert {num_tokens for _, _, num_tokens in order} == {10}
    assert (len(turn.engine), list(turn.models)) == (3, ["text", "llm"])


def test_the_fast_engine_repeats_the_prompt_and_ends_once(default_model_dir: Path) -> None:
    engine = FastEngine(ModelConfig.from_directory(default_model_dir), tokens_per_s=1e6)
    params = SamplingParams(max_tokens=5)
    engine.add_request(EngineRequest(sequence_id=1, prompt_token_ids=[7, 8], params=params))
    outputs = []
    while engine.has_work:
        outputs += engine.step()

    assert [output.token_ids for output in outputs] == [[7], [8], [7], [8], [7]]
    assert [output.finish_reason for output in outputs] == [None] * 4 + [FinishReason.LENGTH]


def test_a_row_of_single_tokens_keeps_their_order() -> None:
    row = EachTokenRow(index=0, sequence_id=1)
    sent = []
    for batch in ([1, 2, 3], [4], [5, 6]):
        for token_id in batch:
            row.add(RequestOutput(1, [token_id]))
        for _ in range(2):
            if row.may_send(is_streaming=True):
                assert row.pending is not None
                sent += row.pending.token_ids
                row.pending = None

    assert sent == [1, 2, 3, 4, 5, 6]


def test_processor_time_is_told_by_process() -> None:
    stub = ["/x/triton_python_backend_stub", "/r/detokenizer/1/model.py", "shm", "67108864"]
    assert kind_of("triton_python_backend_stub", stub) == "detokenizer"
    assert kind_of("tritonserver", ["/opt/bin/tritonserver", "--model-repository", "/r"]) == "tritonserver"
    assert kind_of("python", ["python", "-m", "perf.server.fast_engine"]) == OTHERS
    assert kind_of("python", ["python", "-m", "naiad.gate", "--host", "0.0.0.0"]) == GATE


def test_processor_time_is_shared_out_among_tokens() -> None:
    spent = [{"tritonserver": 2.0, "text": 1.0, LOAD: 4.0}, {"tritonserver": 4.0, "text": 1.0, LOAD: 4.0}]
    turns = [row_of("text", each, made=1000, rate=100.0) for each in spent]
    turns.insert(1, row_of(REST, {"tritonserver": 0.02}, made=10, rate=1.0))

    text, rest = medians(turns)

    assert (text["server"], text["tritonserver"], text["text"], text[LOAD]) == (4.0, 3.0, 1.0, 4.0)
    assert (rest["server"], rest["tokens/s"]) == (2.0, None)


def test_the_gates_processor_time_is_a_share_of_the_others() -> None:
    row = row_of("text", {"tritonserver": 3.0, "text": 1.0, GATE: 1.0, LOAD: 9.0}, made=1000, rate=100.0)
    assert (row["server"], row[GATE], row["gate of the rest"]) == (5.0, 1.0, 0.25)
