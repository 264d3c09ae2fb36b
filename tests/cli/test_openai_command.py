"""What `naiad openai` allows."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from naiad.cli.main import main
from naiad.openai_server import serving
from naiad.openai_server.access.key_file import digest_of
from naiad.openai_server.engines.remote.models import RemoteServer

URL, TOKENIZER = ("--url", "localhost:8001"), ("--tokenizer", "/no/such/directory")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--url", "localhost"), "--url = 'localhost': expected HOST:PORT"),
        (("--url", "http://localhost:8001"), "--url = 'http://localhost:8001': expected HOST:PORT"),
        ((*URL, "--served-name", "a"), "--served-name = 'a': expected one --model"),
        ((*URL, "--served-name", "a", "--model", "b", "--model", "c"), "--served-name = 'a'"),
        ((*URL, "--host", "0.0.0.0"), "--host = '0.0.0.0': expected a loopback address, or --api-keys FILE"),
        ((*URL, "--api-keys", "/no/such/file"), "/no/such/file"),
        ((*URL, "--model-control-key", "/no/such/file"), "--model-control-key /no/such/file can not be read"),
        ((*URL, "--metrics-open"), "--metrics-open = True: expected --api-keys FILE with it"),
        ((*URL, "--fallback", "a"), "--fallback = 'a': expected MODEL=OTHER"),
        (
            (*URL, "--model", "a", "--model", "b", "--fallback", "a=c"),
            "--fallback = 'a=c': expected MODEL=OTHER, two of the names a, b",
        ),
        (
            (*URL, "--model", "a", "--served-name", "x", "--fallback", "x=a"),
            "--fallback = 'x=a': expected MODEL=OTHER, two of the names x",
        ),
        (URL, "config.json"),
    ],
)
def test_wrong_options_are_named(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], named: str
) -> None:
    assert main(["openai", *TOKENIZER, *options]) == 1
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_the_url_and_the_tokenizer_are_required(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for options in (URL, ("--tokenizer", str(tmp_path))):
        with pytest.raises(SystemExit):
            main(["openai", *options])
        assert "required" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("127..0.1", "--host = '127..0.1': expected an address of this machine, such as 127.0.0.1"),
        ("203.0.113.7", "203.0.113.7:0 can not be listened on: "),
    ],
)
def test_a_host_that_can_not_be_listened_on_is_told_in_a_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, told: str
) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"name": "a", "sha256": digest_of("a"), "tenant": "a"}]}))
    keys.chmod(0o600)

    async def listen(_options: object, _gate: object, host: str, port: int, **_: object) -> None:
        await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port)

    monkeypatch.setattr(RemoteServer, "open", lambda *_, **__: None)
    monkeypatch.setattr(serving, "serve", listen)
    words = ["--host", host, "--port", "0", "--api-keys", str(keys)]
    assert main(["openai", *TOKENIZER, *URL, *words]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"naiad: error: {told}")
