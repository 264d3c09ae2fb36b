from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.ports import free_port
from naiad.cli.serve import ports
from naiad.cli.serve.ports import KeptPorts
from naiad.errors import ConfigError, StartupError

HOST = "127.0.0.1"


def test_a_server_can_listen_on_a_kept_port_again_and_again() -> None:
    with KeptPorts() as kept:
        port = kept.keep("--http-port", HOST, 0)
        for _ in range(2):
            with (
                socket.create_server((HOST, port)) as listener,
                socket.create_connection((HOST, port)) as client,
            ):
                accepted, address = listener.accept()
                accepted.close()
                assert address == client.getsockname()


def test_nobody_is_given_a_kept_port() -> None:
    """A free port is asked for with and without SO_REUSEADDR, as servers and clients do."""
    with KeptPorts() as kept:
        ports = {kept.keep("--http-port", HOST, 0) for _ in range(400)}
        given = set()
        for reuse in (0, 1):
            for _ in range(5000):
                with socket.socket() as other:
                    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                    other.bind((HOST, 0))
                    given.add(other.getsockname()[1])
    assert len(ports) == 400
    assert not ports & given


def test_no_connection_is_given_a_kept_port() -> None:
    with KeptPorts() as kept, socket.create_server((HOST, 0)) as listener:
        ports = {kept.keep("--http-port", HOST, 0) for _ in range(400)}
        given = set()
        for _ in range(2000):
            with socket.create_connection(listener.getsockname()) as client:
                given.add(client.getsockname()[1])
                listener.accept()[0].close()
    assert not ports & given


def test_a_port_is_free_again_afterwards() -> None:
    with KeptPorts() as kept:
        port = kept.keep("--http-port", HOST, 0)
    with socket.socket() as other:
        other.bind((HOST, port))


def test_a_port_in_use_is_refused_by_option_and_number() -> None:
    with socket.create_server((HOST, 0)) as listener, KeptPorts() as kept:
        port = listener.getsockname()[1]
        with pytest.raises(StartupError, match=f"--http-port {port} on 127.0.0.1 .*in use"):
            kept.keep("--http-port", HOST, port)
        assert kept.keep_preferred("--http-port", HOST, port) != port


@pytest.mark.parametrize(
    ("first", "second"), [(HOST, HOST), (HOST, "0.0.0.0"), ("0.0.0.0", HOST), ("0.0.0.0", "0.0.0.0")]
)
def test_a_port_that_another_keeps_is_refused_although_nothing_listens_yet(first: str, second: str) -> None:
    with KeptPorts() as others, KeptPorts() as kept:
        port = others.keep("--http-port", first, 0)
        refusal = rf"--http-port {port} on {re.escape(second)} .*another `naiad serve` has it"
        with pytest.raises(StartupError, match=refusal):
            kept.keep("--http-port", second, port)
        assert kept.keep_preferred("--http-port", second, port) != port
        # Nothing of the refused one is left.
        others.__exit__(None, None, None)
        assert kept.keep("--http-port", second, port) == port


def test_the_same_port_of_another_address_is_free() -> None:
    with KeptPorts() as others, KeptPorts() as kept:
        port = others.keep("--http-port", HOST, 0)
        assert kept.keep("--http-port", "127.0.0.2", port) == port


def test_a_port_that_another_process_kept_is_free_when_that_is_killed() -> None:
    script = (
        "import sys\nfrom naiad.cli.serve.ports import KeptPorts\n"
        "kept = KeptPorts()\nprint(kept.keep('--http-port', '127.0.0.1', 0), flush=True)\nsys.stdin.read()\n"
    )
    words = [sys.executable, "-c", script]
    with (
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other,
        KeptPorts() as kept,
    ):
        assert other.stdout is not None
        port = int(other.stdout.readline())
        with pytest.raises(StartupError, match="another `naiad serve` has it"):
            kept.keep("--http-port", HOST, port)
        other.kill()
        other.wait()
        assert kept.keep("--http-port", HOST, port) == port


@pytest.mark.parametrize("is_told", [True, False])
def test_where_there_are_no_claims_ports_are_kept_all_the_same(
    is_told: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ports, "_UNIX_SOCKETS", tmp_path / "nothing")
    if not is_told:
        # The name of a file, in a directory that is not there.
        monkeypatch.setattr(ports, "_claim_name", lambda *_: str(tmp_path / "none" / "a"))
    with KeptPorts() as kept:
        assert kept.keep("--http-port", HOST, 0) > 0


def test_the_preferred_port_is_kept_if_it_is_free() -> None:
    port = free_port()
    with KeptPorts() as kept:
        assert kept.keep_preferred("--openai-port", HOST, port) == port
        assert kept.keep_preferred("--openai-port", HOST, port) != port


def test_the_same_port_twice_is_refused() -> None:
    port = free_port()
    with KeptPorts() as kept, pytest.raises(ConfigError, match=f"--grpc-port = {port}.*another port"):
        kept.keep_each(HOST, {"http": port, "grpc": port})


def test_free_ports_do_not_take_the_place_of_those_asked_for() -> None:
    port = free_port()
    with KeptPorts() as kept:
        ports = kept.keep_each(HOST, {"http": 0, "grpc": port, "metrics": 0})
    assert ports["grpc"] == port
    assert len(set(ports.values())) == 3


@pytest.mark.parametrize("host", ["203.0.113.7", "no host", "127..0.1", "a" * 64])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with (
        KeptPorts() as kept,
        pytest.raises(StartupError, match=r"--host .* is not an address of this machine"),
    ):
        kept.keep("--http-port", host, 0)


@pytest.mark.parametrize("host", ["no host", "127..0.1", "a\0b"])
def test_what_is_no_host_is_not_taken_for_a_port_in_use(host: str) -> None:
    with (
        KeptPorts() as kept,
        pytest.raises(StartupError, match=rf"^--host {re.escape(host)} is not an address"),
    ):
        kept.keep("--http-port", host, free_port())


@pytest.mark.parametrize("host", ["203.0.113.7", "127..0.1"])
@pytest.mark.parametrize("port", [0, 9000])
def test_an_address_of_another_machine_is_refused_by_its_own_option(host: str, port: int) -> None:
    with (
        KeptPorts() as kept,
        pytest.raises(
            StartupError, match=rf"^--openai-host {re.escape(host)} is not an address of this machine"
        ),
    ):
        kept.keep_preferred("--openai-port", host, port)
