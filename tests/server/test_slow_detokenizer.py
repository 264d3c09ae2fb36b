"""A detokenizer that is slow when an engine is lost."""

from __future__ import annotations

import os
from pathlib import Path

from helpers.model_control import control_client
from helpers.raw_grpc import ENDLESS, Stream, text_inputs
from helpers.server import Leaving, eventually, start_repository
from helpers.tiny_repository import create_repository

# As on a machine that is very busy. A process that is stopped is something else for Triton.
SLOW_MODEL = """
import time
from pathlib import Path
from naiad.triton_server.detokenizer_model import DetokenizerModel

class TritonPythonModel(DetokenizerModel):
    def execute(self, requests):
        if Path("{flag}").exists():
            Path("{flag}").with_name("sleeps").touch()
            time.sleep(3)
        return super().execute(requests)
"""


def test_a_lost_engine_and_a_slow_detokenizer_leave_nothing_in_flight(
    tiny_dir: Path, tmp_path: Path, leaving: Leaving
) -> None:
    """A request gets its error while the detokenizer still has chunks of it; its model can be reloaded."""
    repository, key_file, flag = (tmp_path / name for name in ("repository", "key", "slow"))
    create_repository(repository, tiny_dir, "--kv-cache-bytes", "64000000")
    (repository / "detokenizer" / "1" / "model.py").write_text(SLOW_MODEL.format(flag=flag))
    options = ("--model-control-mode", "explicit", "--model-control-key", str(key_file))
    server = start_repository("--model-repository", str(repository), *options)
    try:
        (old,) = server.processes("/llm/1/model.py")
        (engine,) = server.processes("naiad.engine_process")
        stream = Stream(server.grpc, "ensemble", text_inputs("Once", ENDLESS) | {"ignore_eos": True})
        assert stream.got_response.wait(30)
        flag.touch()
        # It has a chunk, and will not answer it soon.
        eventually(flag.with_name("sleeps").exists)
        engine.kill()
        outcome = stream.join()
        assert outcome.num_finals == 1
        assert "the engine process ended" in str(outcome.errors)
        flag.unlink()
        os.utime(repository / "llm" / "1" / "model.py")
        with control_client(server.grpc, key_file) as control:
            control.load_model("llm")
        eventually(lambda: not old.is_running(), 60)
    finally:
        leaving.take(server)
