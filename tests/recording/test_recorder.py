"""What a door records: each accepted request once, when all of its sequences have ended."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from naiad.errors import ConfigError
from naiad.line_file import prepare
from naiad.outputs import RequestOutput, error_output
from naiad.recording.record import RequestRecord
from naiad.recording.record_file import MAX_WAITING, RecordFile
from naiad.recording.recorder import Recorder
from naiad.sequence import EngineRequest, FinishReason, SamplingParams, TextContext

SECRET_IDS = [91234, 95678]


def request(first_id: int = 1, num_sequences: int = 1, prompt: list[int] | None = None) -> EngineRequest:
    return EngineRequest(
        sequence_id=first_id,
        sibling_ids=tuple(range(first_id + 1, first_id + num_sequences)),
        prompt_token_ids=prompt or [*SECRET_IDS, *range(100)],
        params=SamplingParams(
            max_tokens=4,
            temperature=0.5,
            seed=2**64 - 1,
            bad_words=((SECRET_IDS[0],),),
            stop_sequences=((SECRET_IDS[1],),),
        ),
        text=TextContext(stop_strings=("a secret",)),
        cache_salt="a secret",
        tenant="a secret",
    )


class Door:
    """Records to a file."""

    def __init__(self, path: Path, *, with_prompts: bool) -> None:
        self.path = path
        prepare("--record", path)
        self.file = RecordFile(path)
        self.recorder = Recorder(self.file, "triton", lambda: "model", with_prompts=with_prompts)

    def say(self, sequence_id: int, ids: list[int], reason: FinishReason | None = None) -> None:
        self.recorder.take_outputs([RequestOutput(sequence_id, ids, finish_reason=reason)])

    def lines(self) -> list[dict[str, Any]]:
        """Close the file and return what is in it."""
        self.file.close()
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def test_a_request_is_recorded_when_its_last_sequence_ends(tmp_path: Path) -> None:
    door = Door(tmp_path / "r", with_prompts=True)
    door.recorder.begin([request(num_sequences=2)])
    door.say(1, [5])
    door.say(2, [6], FinishReason.CANCELLED)
    door.say(1, [7], FinishReason.LENGTH)
    door.say(1, [8])
    (line,) = door.lines()
    assert [(each["token_ids"], each["finish_reason"]) for each in line["outputs"]] == [
        ([5, 7], "length"),
        ([6], "cancelled"),
    ]
    assert line["params"]["seed"] == 2**64 - 1
    assert line["prompt"]["token_ids"][:2] == SECRET_IDS
    assert (line["format"], line["door"], line["model"]) == ("naiad-record-1", "triton", "model")
    assert door.file.counts() == {"written": 1, "dropped": 0}


def test_without_prompts_nothing_that_was_written_is_in_the_file(tmp_path: Path) -> None:
    door = Door(tmp_path / "r", with_prompts=False)
    door.recorder.begin([request()])
    door.say(1, SECRET_IDS, FinishReason.STOP)
    (line,) = door.lines()
    text = door.path.read_text()
    assert not any(str(each) in text for each in SECRET_IDS)
    assert "a secret" not in text
    assert line["prompt"]["num_tokens"] == 102
    assert line["outputs"][0]["num_tokens"] == 2


def test_prompts_share_the_hashes_of_the_blocks_with_which_they_begin(tmp_path: Path) -> None:
    door = Door(tmp_path / "r", with_prompts=False)
    same = list(range(64))
    for number, prompt in enumerate(([*same, *[7] * 64], [*same, *[8] * 64, 9], same[:63]), 1):
        door.recorder.begin([request(number, prompt=prompt)])
        door.say(number, [], FinishReason.STOP)
    first, second, short = (line["prompt"].get("block_hashes", []) for line in door.lines())
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert (len(first), len(second), short) == (2, 2, [])


def test_what_the_engine_lost_has_failed_and_what_it_refused_was_none(tmp_path: Path) -> None:
    door = Door(tmp_path / "r", with_prompts=True)
    lost, refused = request(1), request(2)
    door.recorder.begin([lost, refused])
    door.recorder.forget([refused])
    refused_by_engine = request(3, num_sequences=2)
    door.recorder.begin([refused_by_engine])
    door.recorder.take_outputs(error_output(each, "INVALID_ARGUMENT", "no") for each in (3, 4))
    door.say(1, [5])
    door.recorder.lose()
    door.recorder.lose()
    (line,) = door.lines()
    assert [(each["token_ids"], each["finish_reason"]) for each in line["outputs"]] == [([5], "error")]
    assert door.file.counts() == {"written": 1, "dropped": 0}


@pytest.mark.parametrize("is_full", [False, True])
def test_a_file_that_can_not_be_written_costs_records_only(tmp_path: Path, is_full: bool) -> None:
    door = Door(tmp_path / "r", with_prompts=True)
    door.path.unlink()
    if is_full:
        door.path.symlink_to("/dev/full")
    else:
        door.path.mkdir()
    door.recorder.begin([request()])
    door.say(1, [5], FinishReason.STOP)
    door.file.close()
    assert door.file.counts() == {"written": 0, "dropped": 1}


def test_a_record_that_can_not_be_made_is_told_by_its_place_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    door = Door(tmp_path / "r", with_prompts=True)

    def make() -> RequestRecord:
        raise KeyError("a secret")

    door.file.add(make)
    door.file.close()
    (said,) = caplog.messages
    assert "records are dropped: KeyError at recording/test_recorder.py:" in said
    assert "secret" not in caplog.text


def test_too_many_records_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody writes.
    monkeypatch.setattr(RecordFile, "_run", lambda _self: None)
    door = Door(tmp_path / "r", with_prompts=True)
    for number in range(1, MAX_WAITING + 3):
        door.recorder.begin([request(number)])
        door.say(number, [], FinishReason.STOP)
    assert door.file.counts() == {"written": 0, "dropped": 2}


def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "r"
    prepare("--record", path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    prepare("--record", path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 0600"):
        prepare("--record", path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ConfigError, match="--record"):
        prepare("--record", tmp_path / "link")
    with pytest.raises(ConfigError, match="--record"):
        prepare("--record", tmp_path / "none" / "r")
    with pytest.raises(ConfigError, match="--record"):
        prepare("--record", tmp_path)
