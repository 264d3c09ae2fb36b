"""Options of `naiad serve` that have an effect only with others."""

from __future__ import annotations

from pathlib import Path

import pytest

from naiad.cli.main import main

PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
NO_API = ("--openai-port", "off")
API = ("--openai-port", "0")
# An address for documentation, on which nothing can listen.
EXPOSED = ("--host", "192.0.2.1")


def last_line(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The last line of a `naiad serve` that does not start; at the latest there is no such model."""
    assert main(["serve", "--model", "/no/such/model", *PORTS, *options]) == 1
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ((*API, "--metrics-open"), "--metrics-open = True: expected --api-keys FILE with it"),
        ((*API, "--expose-triton", *EXPOSED), "--expose-triton = True: expected --api-keys FILE with it"),
        (
            (*NO_API, "--openai-lenient"),
            "--openai-lenient = True: expected an --openai-port with it, not off",
        ),
        ((*NO_API, "--openai-host", "::1"), "--openai-host = '::1': expected an --openai-port"),
        ((*NO_API, "--openai-allowed-host", "a"), "--openai-allowed-host = ['a']: expected an --openai-port"),
        ((*NO_API, "--openai-allowed-origin", "http://a"), "--openai-allowed-origin = ['http://a']: "),
        ((*NO_API, "--openai-fallback", "a=b"), "--openai-fallback = ['a=b']: expected an --openai-port"),
        ((*NO_API, "--openai-header-timeout-s", "9"), "--openai-header-timeout-s = 9: expected an --openai-"),
        ((*NO_API, "--openai-reasoning", "none"), "--openai-reasoning = 'none': expected an --openai-port"),
        ((*NO_API, "--openai-tool-parser", "none"), "--openai-tool-parser = 'none': expected an --openai-"),
        (
            (*API, "--gate-allowed-host", "a"),
            "--gate-allowed-host = ['a']: expected --gate on with it, or a --host that others can reach",
        ),
        (
            (*API, "--gate-allowed-origin", "http://a"),
            "--gate-allowed-origin = ['http://a']: expected --gate",
        ),
        ((*API, "--gate-max-body-bytes", "5000"), "--gate-max-body-bytes = 5000: expected --gate on"),
        (
            (*API, "--gate", "off", "--gate-max-connections", "9"),
            "--gate-max-connections = 9: expected --gate",
        ),
        (
            (*NO_API, "--slow-reader-s", "9"),
            "--slow-reader-s = 9: expected an --openai-port with it, or the gate",
        ),
        (
            (*API, "--i-accept-known-holes", *EXPOSED),
            "--i-accept-known-holes = True: expected --gate off with it, and a --host that others can reach",
        ),
        ((*API, "--i-accept-known-holes", "--gate", "off"), "--i-accept-known-holes = True: expected --gate"),
        ((*API, "--record-prompts"), "--record-prompts = True: expected --record FILE with it"),
        ((*API, "--model-control-key", "f"), "--model-control-key = 'f': expected --model-control-mode expl"),
    ],
)
def test_an_option_that_would_have_no_effect_is_refused_with_what_it_needs(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], refusal: str
) -> None:
    assert last_line(capsys, *options).startswith(f"naiad: error: {refusal}")


@pytest.mark.parametrize(
    "options",
    [
        (*NO_API, *EXPOSED, "--gate-allowed-host", "a", "--gate-max-connections", "9"),
        (*NO_API, "--gate", "on", "--gate-allowed-origin", "http://a", "--slow-reader-s", "9"),
        (*NO_API, *EXPOSED, "--gate", "off", "--i-accept-known-holes"),
        (*API, "--openai-host", "::1", "--openai-lenient", "--openai-allowed-host", "a"),
        (*API, "--slow-reader-s", "9"),
        # What is as if it was not given.
        (*NO_API, "--openai-host", "127.0.0.1", "--slow-reader-s", "60", "--gate-max-connections", "1024"),
    ],
)
def test_an_option_with_what_it_needs_is_taken(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    # What comes after the check: the ports, then the model.
    ended_by = "192.0.2.1 is not an address of this machine" if "--host" in options else "/no/such/model"
    assert ended_by in last_line(capsys, *options)


def test_an_option_of_the_file_is_refused_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text('openai-port = "off"\nopenai-lenient = true\n')
    assert "--openai-lenient = True: expected an --openai-port" in last_line(capsys, "--config", str(path))


def test_a_file_with_all_defaults_is_taken(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["serve", "--print-config", *NO_API]) == 0
    path = tmp_path / "serve.toml"
    path.write_text(capsys.readouterr().out)
    assert "/no/such/model" in last_line(capsys, "--config", str(path))
