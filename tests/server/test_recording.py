"""What a real server records plays again, whichever door it came by."""

from __future__ import annotations

import argparse
import json
import stat
import urllib.request
from pathlib import Path

from helpers.server import eventually, start_server
from naiad.cli.replay import command

ROOMY = "64000000"


def test_requests_of_every_door_are_recorded_and_play_again(tiny_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "records"
    options = ("--served-name", "tiny", "--kv-cache-bytes", ROOMY, "--openai-port", "0")
    server = start_server(tiny_dir, *options, "--record", str(path), "--record-prompts")
    try:
        prompt = {"text_input": "ab", "max_tokens": 6, "temperature": 0.9}
        for model in ("text", "ensemble"):
            assert server.post(f"/v2/models/{model}/generate", prompt)[0] == 200
        body = {"model": "tiny", "prompt": "ab", "max_tokens": 6, "n": 2}
        head = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{server.openai}/completions", json.dumps(body).encode(), head)
        with urllib.request.urlopen(asked) as answer:
            assert answer.status == 200
        eventually(lambda: path.read_bytes().count(b"\n") == 3)
    finally:
        server.stop()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted((line["door"], line["model"]) for line in lines) == [
        ("openai", "tiny"),
        ("triton", "tiny"),
        ("triton", "tiny"),
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = ["--model", str(tiny_dir), "--kv-cache-bytes", ROOMY, "--max-num-batched-tokens", "128"]
    assert command.run(parser.parse_args([str(path), *words])) == 0
