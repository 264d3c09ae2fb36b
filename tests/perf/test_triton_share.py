from __future__ import annotations

from pathlib import Path

from perf.server.each_token_row import EachTokenRow
from perf.server.fast_engine import FastEngine
from perf.server.processor_time import LOAD, OTHERS, REST, kind_of, medians, row_of
from perf.server.triton_share import rows

from naiad.cli.throughput import Timing
from naiad.config import ModelConfig
from naiad.outputs import RequestOutput
from naiad.sequence import EngineRequest, FinishReason, SamplingParams


def timing(total_s: float) -> Timing:
    return Timing(batch=4, prompt_tokens=1, output_tokens=10, first_token_s=1.0, total_s=total_s)


def test_a_share_is_the_median_of_the_ratios_of_each_turn() -> None:
    turns = [
        {"engine": timing(10.0), "llm": timing(12.5)},
        {"engine": timing(20.0), "llm": timing(40.0)},  # others used the machine
        {"engine": timing(10.0), "llm": timing(10.0)},
    ]

    engine, llm = rows(turns)

    assert engine["of the engine"] == 1.0
    assert (llm["of the engine"], llm["least"], llm["most"]) == (0.8, 0.5, 1.0)
    assert llm["all new tokens/s"] == 3.2


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


def test_processor_time_is_shared_out_among_tokens() -> None:
    spent = [{"tritonserver": 2.0, "text": 1.0, LOAD: 4.0}, {"tritonserver": 4.0, "text": 1.0, LOAD: 4.0}]
    turns = [row_of("text", each, made=1000, rate=100.0) for each in spent]
    turns.insert(1, row_of(REST, {"tritonserver": 0.02}, made=10, rate=1.0))

    text, rest = medians(turns)

    assert (text["server"], text["tritonserver"], text["text"], text[LOAD]) == (4.0, 3.0, 1.0, 4.0)
    assert (rest["server"], rest["tokens/s"]) == (2.0, None)
