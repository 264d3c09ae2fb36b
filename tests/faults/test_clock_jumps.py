"""The wall clock jumps by a day in an engine's process while it works: nothing ends early or late."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.engine_harness import Recorder, make_request
from helpers.tiny_repository import tiny_checkpoint
from naiad.config import EngineConfig
from naiad.engine_process import EngineClient
from naiad.sequence import EngineRequest, FinishReason, SamplingParams

_LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
pytestmark = pytest.mark.skipif(not _LIBRARIES, reason="libfaketime is not installed (Debian: faketime)")

_DAY_S = 86_400
# Longer than the jumps take, which are seen within a second each.
_TIMEOUT_S = 4.0
# Beside other work a step may begin late. A deadline that followed the clock back would pass in days.
_LATE_S = 20.0
# The last of two that run waits for them.
_STREAM, _RUNNING, _WAITING, _LATER = 1, 2, 3, 4


class Wall:
    """The engine's wall clock: that of the machine and a number of seconds."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset_s = 0
        self.jump(0)

    def jump(self, seconds: int) -> None:
        self._offset_s += seconds
        # Renamed, so that the engine never reads half a number.
        new = self._file.with_suffix(".new")
        new.write_text(f"{self._offset_s:+d}\n", encoding="ascii")
        new.replace(self._file)

    def is_seen(self, recorder: Recorder) -> bool:
        """Whether the engine reports a time of this clock."""
        return (
            bool(recorder.stats) and abs(recorder.stats[-1].timestamp_s - self._offset_s - time.time()) < 60
        )


@pytest.fixture
def wall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wall:
    file = tmp_path / "wall"
    monkeypatch.setenv("LD_PRELOAD", str(_LIBRARIES[0]))
    monkeypatch.setenv("FAKETIME_TIMESTAMP_FILE", str(file))
    monkeypatch.setenv("FAKETIME_NO_CACHE", "1")
    monkeypatch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
    return Wall(file)


@pytest.fixture
def served(tmp_path: Path, wall: Wall) -> Iterator[tuple[EngineClient, Recorder]]:
    recorder = Recorder()
    config = EngineConfig(
        model_dir=str(tiny_checkpoint(tmp_path / "tiny")),
        dtype="float32",
        cpu_threads=1,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        kv_cache_bytes=1 << 26,
    )
    # pytest's own directories may have paths too long for a socket.
    with tempfile.TemporaryDirectory(prefix="naiad-test-") as folder:
        path = Path(folder, "llm.engine")
        client = EngineClient(config, path, recorder.on_outputs, recorder.on_lost)
        client.start()
        yield client, recorder
        client.close(timeout_s=0)


def endless(sequence_id: int, timeout_s: float) -> EngineRequest:
    """A request that its deadline or its client ends."""
    params = SamplingParams(max_tokens=30_000)
    return EngineRequest(sequence_id=sequence_id, prompt_token_ids=[5], params=params, timeout_s=timeout_s)


def jump_and_see(wall: Wall, recorder: Recorder, seconds: int) -> None:
    wall.jump(seconds)
    recorder.wait_for(lambda: wall.is_seen(recorder))


def test_deadlines_do_not_follow_the_clock_of_the_wall(
    served: tuple[EngineClient, Recorder], wall: Wall
) -> None:
    client, recorder = served
    asked_s = time.monotonic()
    client.submit([endless(_STREAM, 3600.0), endless(_RUNNING, _TIMEOUT_S), endless(_WAITING, _TIMEOUT_S)])
    recorder.wait_started(_RUNNING)
    jump_and_see(wall, recorder, _DAY_S)
    jump_and_see(wall, recorder, -2 * _DAY_S)
    for each in (_RUNNING, _WAITING):
        recorder.wait_finished(each)
        assert recorder.reason(each) is FinishReason.TIMEOUT
        assert _TIMEOUT_S <= time.monotonic() - asked_s < _TIMEOUT_S + _LATE_S
    num_tokens = len(recorder.token_ids(_STREAM))
    recorder.wait_for(lambda: len(recorder.token_ids(_STREAM)) > num_tokens)
    client.abort([_STREAM])
    client.submit([make_request(_LATER, first_id=5)])
    recorder.wait_finished(_STREAM, _LATER)
    assert recorder.reason(_STREAM) is FinishReason.CANCELLED
    assert recorder.token_ids(_LATER) == recorder.token_ids(_STREAM)[:3]
    assert [recorder.num_finishes(each) for each in (_STREAM, _RUNNING, _WAITING, _LATER)] == [1] * 4
    assert recorder.num_losses == 0
