"""`naiad replay`: the same ids, or the first difference; traces of other formats."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from helpers.engine_harness import wait_until
from helpers.tiny_repository import tiny_checkpoint
from naiad.cli.replay import command
from naiad.cli.replay.differences import difference_of
from naiad.cli.replay.played import Lengths, read_requests
from naiad.config import EngineConfig
from naiad.engine_process import EngineClient
from naiad.errors import ConfigError
from naiad.line_file import prepare
from naiad.outputs import EngineStats, RequestOutput
from naiad.recording.record import recorded_output
from naiad.recording.record_file import RecordFile
from naiad.recording.recorder import Recorder
from naiad.sequence import EngineRequest, FinishReason, SamplingParams
from naiad_kernels.native.build import BuildError, compiler
from naiad_kernels.native.variants import best_variant

OPTIONS = ("--dtype", "float32", "--max-num-batched-tokens", "64", "--kv-cache-bytes", str(1 << 24))
NUM_REQUESTS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        compiler()
    except BuildError:
        pytest.skip("no C++ compiler is installed, and only native kernels are batch-invariant on a CPU")
    if best_variant() is None:
        pytest.skip("native kernels need AVX2")
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "checkpoint")


@pytest.fixture(scope="module")
def records(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Requests of an engine: greedy and drawn ones, siblings, and one that is cancelled."""
    folder = tmp_path_factory.mktemp("records")
    prepare("--record", folder / "with")
    prepare("--record", folder / "without")
    files = [RecordFile(folder / "with"), RecordFile(folder / "without")]
    recorders = [Recorder(file, "triton", lambda: "tiny", with_prompts=file is files[0]) for file in files]
    ended: set[int] = set()
    begun: set[int] = set()

    def take(outputs: list[RequestOutput], _stats: EngineStats | None) -> None:
        for recorder in recorders:
            recorder.take_outputs(outputs)
        begun.update(each.sequence_id for each in outputs if each.token_ids)
        ended.update(each.sequence_id for each in outputs if each.finish_reason is not None)

    config = EngineConfig(
        model_dir=str(checkpoint),
        dtype="float32",
        max_num_batched_tokens=64,
        kv_cache_bytes=1 << 24,
        batch_invariant=True,
    )
    client = EngineClient(config, folder / "engine.sock", take, lambda: None)
    client.start()
    requests = [made_request(10 * number + 1, number) for number in range(NUM_REQUESTS)]
    for recorder in recorders:
        recorder.begin(requests)
    client.submit(requests)
    wait_until(lambda: requests[-1].sequence_id in begun)
    client.abort([requests[-1].sequence_id])
    wait_until(lambda: len(ended) == sum(len(each.sequence_ids) for each in requests))
    client.close(5)
    for file in files:
        file.close()
    return folder


def made_request(first_id: int, number: int) -> EngineRequest:
    is_last = number == NUM_REQUESTS - 1
    return EngineRequest(
        sequence_id=first_id,
        sibling_ids=(first_id + 1, first_id + 2) if number % 4 == 3 and not is_last else (),
        prompt_token_ids=[(7 * number + place) % 200 + 10 for place in range(5 + 9 * number)],
        params=SamplingParams(
            max_tokens=200 if is_last else 8 + number, temperature=number % 3 * 0.7, seed=number + 1
        ),
    )


def replay(path: Path, model: Path, *options: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(path), "--model", str(model), *OPTIONS, *options]))


def test_the_same_engine_gives_the_same_ids(
    records: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # In another order and another batch: the speed is not that of the recording.
    assert replay(records / "with", checkpoint, "--max-num-seqs", "2") == 0
    assert f"all {NUM_REQUESTS} compared requests gave the same ids" in capsys.readouterr().out


def test_other_weights_give_a_first_difference(
    records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(records / "with", tiny_checkpoint(tmp_path / "other", seed=1)) == 1
    out = capsys.readouterr().out
    place = r"line \d+, sequence 0, output token \d+.*: id \d+, recorded was id \d+"
    assert re.search(f"requests gave other ids; the first: {place}", out)


def test_without_prompts_the_lengths_are_played(
    records: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(records / "without", checkpoint) == 0
    out = capsys.readouterr().out
    assert "nothing to compare with" in out
    lines = [json.loads(line) for line in (records / "with").read_text().splitlines()]
    num_tokens = sum(each["num_tokens"] for line in lines for each in line["outputs"])
    assert f": {num_tokens} output tokens" in out


def test_a_trace_of_mooncake_or_aiperf_is_played(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"timestamp": 1000 + 100 * each, "input_length": 30, "output_length": 5, "hash_ids": [each % 2]}
        for each in range(3)
    ]
    trace = written(tmp_path, *rows, {"timestamp": 1000, "input_length": 10**6, "output_length": 1})
    assert replay(trace, checkpoint, "--speed", "10") == 0
    captured = capsys.readouterr()
    assert "played 3 requests" in captured.out
    assert ": 15 output tokens" in captured.out
    assert "1 requests are left out" in captured.err


def test_a_draft_model_is_named_as_a_model_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine itself knows directories alone."""
    resolved: list[tuple[str, str]] = []

    def resolve(name: str, option: str = "--model") -> Path:
        resolved.append((name, option))
        return tmp_path / name

    played: list[EngineConfig] = []

    def note(config: EngineConfig, *_: object) -> tuple[float, list[Any]]:
        played.append(config)
        return 0.0, []

    monkeypatch.setattr(command, "resolve_model", resolve)
    monkeypatch.setattr(command, "_play", note)
    monkeypatch.setattr(command, "_summary", lambda *_: "")
    trace = written(tmp_path, {"timestamp": 0, "input_length": 1, "output_length": 1})
    assert replay(trace, Path("target"), "--drafter", "draft_model", "--draft-model", "org/draft") == 0
    assert ("org/draft", "--draft-model") in resolved
    (config,) = played
    assert (config.model_dir, config.draft_model) == (str(tmp_path / "target"), str(tmp_path / "org/draft"))


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_times_begin_with_the_first_request(tmp_path: Path) -> None:
    row = {"input_length": 5, "output_length": 2}
    made = read_requests(written(tmp_path, {"timestamp": 5000} | row, {"timestamp": 3500} | row))
    assert [(each.line, each.due_s) for each in made] == [(2, 0.0), (1, 1.5)]
    assert [each.request.params.max_tokens for each in made] == [2, 2]


@pytest.mark.parametrize(
    "row",
    [
        {"timestamp": 0, "text_input": "Hi"},
        {"timestamp": 0, "input_length": 0, "output_length": 1},
        {"format": "naiad-record-1"},
        [],
    ],
)
def test_other_lines_are_refused_by_number(tmp_path: Path, row: Any) -> None:
    path = written(tmp_path, {"timestamp": 0, "input_length": 1, "output_length": 1}, row)
    with pytest.raises(ConfigError, match=r"trace\.jsonl line 2"):
        read_requests(path)


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "empty").write_text(text)
    with pytest.raises(ConfigError, match="at least one request"):
        read_requests(tmp_path / "empty")


def test_prompts_that_begin_with_the_same_blocks_begin_with_the_same_tokens() -> None:
    first, second = (
        Lengths(num_tokens=10, blocks=["a", each], block_tokens=4, rest=each).draw(1000) for each in "bc"
    )
    assert first[:4] == second[:4]
    assert first[4:] != second[4:]
    assert len(first) == 10


@pytest.mark.parametrize(
    ("recorded", "reason", "played", "place"),
    [
        ([1, 2], FinishReason.STOP, [1, 2], None),
        ([1, 2], FinishReason.STOP, [1, 3], 1),
        ([1, 2], FinishReason.LENGTH, [1], 1),
        ([1, 2], FinishReason.LENGTH, [1, 2, 3], 2),
        ([1, 2], FinishReason.CANCELLED, [1, 2, 3], None),
        ([1, 2], FinishReason.TIMEOUT, [1], 1),
        ([], FinishReason.ERROR, [1], None),
    ],
)
def test_cancelled_ones_compare_what_they_had(
    recorded: list[int], reason: FinishReason, played: list[int], place: int | None
) -> None:
    expected = [recorded_output(recorded, reason, with_ids=True)]
    found = difference_of(1, expected, [played])
    assert (None if found is None else found.place) == place
