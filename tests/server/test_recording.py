"""What a real server records plays again, whichever door it came by."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import stat
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from helpers.openai_api import CHAT, COMPLETIONS, post
from helpers.openai_requests import drawn_body, text_fields
from helpers.server import Server, eventually, start_server
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


def send(server: Server, number: int) -> bool:
    """Send a random request by one of three doors; return whether it was accepted."""
    draw = random.Random(f"thousand {number}")
    path = draw.choice((CHAT, COMPLETIONS))
    asked = drawn_body(draw, path)
    fields = text_fields(asked) if draw.random() < 0.5 else None
    if fields is None:
        return post(server, path, {"model": "tiny", **asked})[0] == 200
    model = draw.choice(("text", "ensemble"))
    return server.post(f"/v2/models/{model}/generate", fields)[0] == 200


def replay(path: Path, model: Path, *options: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    fast = ("--speed", "1000", "--max-queued-requests", "5000", "--max-num-batched-tokens", "128")
    words = [str(path), "--model", str(model), "--kv-cache-bytes", ROOMY, *fast, *options]
    return command.run(parser.parse_args(words))


@pytest.mark.slow
def test_a_thousand_mixed_requests_play_again(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "records"
    options = ("--served-name", "tiny", "--kv-cache-bytes", ROOMY, "--openai-port", "0", "--dtype", "float32")
    server = start_server(tiny_dir, *options, "--record", str(path), "--record-prompts")
    try:
        with ThreadPoolExecutor(8) as pool:
            accepted = list(pool.map(lambda number: send(server, number), range(1000)))
    finally:
        server.stop()
    assert sum(accepted) > 900
    assert path.read_bytes().count(b"\n") >= sum(accepted)
    assert replay(path, tiny_dir, "--dtype", "float32") == 0
    assert "gave the same ids" in capsys.readouterr().out

    assert replay(path, tiny_dir, "--dtype", "bfloat16") == 1
    assert "gave other ids; the first: line" in capsys.readouterr().out

    changed = Path(shutil.copytree(tiny_dir, tmp_path / "changed"))
    weights = load_file(changed / "model.safetensors")
    name = next(each for each in weights if each.endswith("0.mlp.up_proj.weight"))
    weights[name][0] += 1.0
    save_file(weights, changed / "model.safetensors", {"format": "pt"})
    assert replay(path, changed, "--dtype", "float32") == 1
    assert "gave other ids; the first: line" in capsys.readouterr().out
