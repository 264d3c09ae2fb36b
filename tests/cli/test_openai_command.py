"""What `naiad openai` allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from naiad.cli.main import main

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
