from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.fake_naiad_server import FakeServer, failure, response, words
from naiad_client.__main__ import main


def test_command_prints_the_text(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer = words("Par", "is")

    assert main(["capital?", "--url", server.url]) == 0
    assert capsys.readouterr().out == "Paris\n"


def test_command_prints_figures_on_stderr(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer = words("a", "b", "c")
    main(["?", "--url", server.url])

    summary = capsys.readouterr().err
    assert summary.startswith("3 tokens, ")
    assert "tokens/s" in summary
    assert "first token after" in summary


def test_command_passes_its_options_on(server: FakeServer) -> None:
    server.answer = words("a")
    options = ["--chat", "--max-tokens", "9", "--temperature", "0.5", "--top-k", "4", "--top-p", "0.9"]
    options += ["--min-p", "0.1"]
    main(
        ["?", *options, "--seed", "3", "--stop", "x", "--stop", "y", "--url", server.url, "--model", "other"]
    )

    sent = server.sent()
    assert server.requests[-1].model_name == "other"
    assert sent.keys() >= {"messages", "temperature", "top_k", "top_p", "min_p", "seed"}
    assert sent["max_tokens"][2] == struct.pack("<i", 9)
    assert sent["stop_words"][1] == [1, 2]


@pytest.mark.parametrize("url", ["127.0.0.1:1", "127..0.1:1"])
def test_command_fails_in_one_line_without_a_server(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["?", "--url", url]) == 1

    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert url in error


def test_command_fails_with_the_servers_message(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = failure("the prompt is empty")

    assert main(["?", "--url", server.url]) == 1
    assert capsys.readouterr().err == "error: the prompt is empty\n"


def test_command_puts_an_error_after_text_on_a_line_of_its_own(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(request: Any, context: Any) -> Iterator[Any]:
        yield response("Par")
        yield from failure("the engine was lost")(request, context)

    server.answer = answer

    assert main(["?", "--url", server.url]) == 1
    assert capsys.readouterr().out == "Par\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_gets_no_control_characters(
    server: FakeServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_terminal: bool,
) -> None:
    server.answer = words("\x1b[2J", "a\tb\r\n", "\x9bé👩\u200d🔬")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    main(["?", "--url", server.url])
    shown = "?[2Ja\tb\n?é👩\u200d🔬\n"
    assert capsys.readouterr().out == (shown if is_terminal else "\x1b[2Ja\tb\r\n\x9bé👩\u200d🔬\n")


def test_command_ends_quietly_when_its_reader_is_gone(server: FakeServer) -> None:
    server.answer = words(*("a" * 100 for _ in range(2000)))
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed_pipe:
        done = subprocess.run(
            [sys.executable, "-m", "naiad_client", "?", "--url", server.url],
            stdout=closed_pipe,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("word", "redirection", "message"),
    [
        ("?", ">/dev/full", "error: No space left on device\n"),
        ("-", "<&-", "error: there is no standard input to read\n"),
        ("--chat", "<&-", "error: there is no standard input to read\n"),
    ],
)
def test_output_and_input_that_are_not_there_are_told_in_a_line(
    server: FakeServer, word: str, redirection: str, message: str
) -> None:
    server.answer = words("a")
    command = [sys.executable, "-m", "naiad_client", "--url", server.url, word]
    redirected = ["sh", "-c", f'exec "$@" {redirection}', "sh", *command]
    done = subprocess.run(redirected, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, message)


def messages(request: Any) -> list[dict[str, str]]:
    """The chat that a request holds."""
    contents = {
        tensor.name: content
        for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True)
    }
    return list(json.loads(contents["messages"][4:]))


def test_a_dash_reads_the_prompt_from_standard_input(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answer = words("a")
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines"))
    assert main(["-", "--url", server.url]) == 0
    assert server.sent()["text_input"][2][4:] == b"two\nlines"


def test_a_system_message_comes_first(server: FakeServer) -> None:
    server.answer = words("a")
    assert main(["hello", "--chat", "--system", "be brief", "--url", server.url]) == 0
    assert messages(server.requests[-1]) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
    ]


def test_a_conversation_carries_what_was_said(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = words("Pa", "ris")
    monkeypatch.setattr(sys, "stdin", io.StringIO("capital?\n\nsure?\n"))
    assert main(["--chat", "--url", server.url]) == 0
    assert len(server.requests) == 2
    assert messages(server.requests[-1]) == [
        {"role": "user", "content": "capital?"},
        {"role": "assistant", "content": "Paris"},
        {"role": "user", "content": "sure?"},
    ]
    assert capsys.readouterr().out == "Paris\nParis\n"


def test_a_refused_message_is_not_part_of_the_conversation(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([failure("too long"), words("fine")])
    server.answer = lambda request, context: next(answers)(request, context)
    monkeypatch.setattr(sys, "stdin", io.StringIO("long\nshort\n"))
    assert main(["--chat", "--url", server.url]) == 1
    assert "error: too long\n" in capsys.readouterr().err
    assert messages(server.requests[-1]) == [{"role": "user", "content": "short"}]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "a prompt is missing: give one, or - for standard input"),
        (["x", "--system", "y"], "--system needs --chat"),
        (["x", "--max-tokens", "many"], "argument --max-tokens: invalid int value: 'many'"),
    ],
)
def test_a_wrong_command_line_is_told_in_one_line(
    options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(options)
    error = capsys.readouterr().err
    assert error.startswith(f"error: {reason}")
    assert error.count("\n") == 1


def test_a_wrong_url_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["x", "--url", "http://"]) == 1
    assert capsys.readouterr().err == (
        "error: url = 'http://': expected HOST:PORT, http://HOST:PORT or https://HOST:PORT\n"
    )
