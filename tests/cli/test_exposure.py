"""When the gate stands in front of the server."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

import pytest

from naiad.cli.main import main
from naiad.cli.serve.exposure import host_of_triton, warn_if_exposed
from naiad.errors import ConfigError
from naiad.gate.__main__ import parse

ANYWHERE = "0.0.0.0"
EXPOSED = ("--host", ANYWHERE)


def last_line(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The last line of a `naiad serve` that does not start; at the latest there is no such model."""
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--openai-port", "off"]
    assert main(["serve", "--model", "/no/such/model", *ports, *options]) == 1
    return capsys.readouterr().err.splitlines()[-1]


def is_allowed(line: str) -> bool:
    return "/no/such/model" in line


@pytest.mark.parametrize(
    "options",
    [
        ("--gate", "off"),
        ("--gate", "on"),
        EXPOSED,
        (*EXPOSED, "--gate", "on"),
        (*EXPOSED, "--gate", "off", "--i-accept-known-holes"),
        (*EXPOSED, "--gate", "off", "--tritonserver", "/bin/true"),
    ],
)
def test_allowed(capsys: pytest.CaptureFixture[str], options: tuple[str, ...]) -> None:
    assert is_allowed(last_line(capsys, *options))


def test_the_bundled_server_is_not_exposed_by_accident(capsys: pytest.CaptureFixture[str]) -> None:
    line = last_line(capsys, *EXPOSED, "--gate", "off")
    assert "--gate = 'off': expected on, or --i-accept-known-holes with it" in line
    assert ANYWHERE in line


V6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))
V4 = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))


def test_triton_gets_the_ipv4_address_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_of_triton("127.0.0.2") == "127.0.0.2"
    assert host_of_triton("0.0.0.0") == "0.0.0.0"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [V6, V4])
    assert host_of_triton("localhost") == "127.0.0.1"


def test_a_name_without_an_ipv4_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [V6])
    with pytest.raises(ConfigError, match="--host = 'six': expected an IPv4 address, or --gate on"):
        host_of_triton("six")


@pytest.mark.parametrize("host", ["no host", "127..0.1", "a" * 64])
def test_what_is_no_host_is_left_to_the_ports(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert host_of_triton(host) == host
    words = ("--host", host, "--gate", "off", "--tritonserver", "/bin/true")
    assert f"--host {host} is not an address of this machine" in last_line(capsys, *words)


def test_ipv6_needs_the_gate(capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("::1", "::"):
        words = ("--host", host, "--gate", "off", "--tritonserver", "/bin/true")
        assert f"--host = '{host}': expected an IPv4 address, or --gate on" in last_line(capsys, *words)
    # The gate takes it, where the machine has such an address.
    assert "expected an IPv4 address" not in last_line(capsys, "--host", "::1", "--gate", "on")


@pytest.mark.parametrize("is_gated", [False, True])
def test_an_address_that_others_can_reach_is_told(is_gated: bool, capsys: pytest.CaptureFixture[str]) -> None:
    args = argparse.Namespace(host=ANYWHERE, api_keys=None, model_control_mode="none")
    warn_if_exposed(args, is_bundled=False, is_gated=is_gated)
    said = capsys.readouterr().err
    assert ANYWHERE in said
    assert ("The gate checks what they send" in said) == is_gated
    args.host = "127.0.0.2"
    warn_if_exposed(args, is_bundled=False, is_gated=is_gated)
    assert capsys.readouterr().err == ""


def test_the_gates_own_options() -> None:
    ports = [f"--{end}={number}" for number, end in enumerate(PORT_OPTIONS, 1)]
    limits = ["--max-body-bytes=5000", "--max-connections=7", "--slow-reader-s=3"]
    names = ["--allowed-host=a", "--allowed-host=b", "--allowed-origin=https://a", "--model-control"]
    options, log_format = parse(["--host", ANYWHERE, *ports, *limits, *names, "--log-format=json"])
    assert (options.host, log_format, options.has_model_control) == (ANYWHERE, "json", True)
    assert (options.ports.http, options.server.http, options.server.metrics) == (1, 4, 6)
    assert (options.allowed_hosts, options.allowed_origins) == (("a", "b"), ("https://a",))
    assert options.limits.max_body_bytes == 5000
    assert (options.limits.max_connections, options.limits.slow_reader_s) == (7, 3.0)


PORT_OPTIONS = (
    *("http-port", "grpc-port", "metrics-port"),
    *("server-http-port", "server-grpc-port", "server-metrics-port"),
)


def test_the_gates_options_are_in_the_file_of_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('gate = "on"\ngate-allowed-host = ["a.example"]\nslow-reader-s = 5\n')
    assert main(["serve", "--config", str(file), "--print-config"]) == 0
    written = capsys.readouterr().out
    assert 'gate = "on"' in written
    assert 'gate-allowed-host = ["a.example"]' in written
    assert "slow-reader-s = 5" in written
