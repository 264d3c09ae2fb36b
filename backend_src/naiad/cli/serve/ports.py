"""The ports of the servers: chosen, checked, and kept from others until a server listens there."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from naiad.errors import ConfigError, StartupError

_CLAIM = "naiad-port-"
_EVERYWHERE = frozenset({"0.0.0.0", "::"})
_UNIX_SOCKETS = Path("/proc/net/unix")


class KeptPorts:
    """Ports that nothing else on this machine is given.

    Each is bound by a socket that never listens. The system then gives the port to no connection and to
    nobody who asks for any free port, while a server that sets SO_REUSEADDR, as Triton's and uvicorn do,
    can listen there: when it starts, and again after each restart.

    Another `naiad serve` could bind such a socket too, as long as nothing listens. So each port is claimed as
    well, by a Unix socket in the abstract namespace, which belongs to the same network namespace as the port
    and goes with this process.
    """

    def __init__(self) -> None:
        """Keep none yet."""
        self._ports: set[int] = set()
        self._sockets = contextlib.ExitStack()

    def __enter__(self) -> KeptPorts:
        """Keep what `keep` is asked for until the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Keep none any longer."""
        self._ports.clear()
        self._sockets.close()

    def keep(self, option: str, host: str, port: int) -> int:
        """Keep the port, or any free one if it is 0; return it.

        Raises:
            ConfigError: it is kept already.
            StartupError: it is in use, kept by another process or not allowed, or the machine does not have
                the address.
        """
        if port in self._ports:
            raise ConfigError(option, port, "another port than the others'")
        with contextlib.ExitStack() as sockets:
            try:
                kept = sockets.enter_context(_bound_socket(host, port))
                address, number = kept.getsockname()[:2]
                sockets.enter_context(_claim(address, number))
            except (OSError, OverflowError, ValueError) as error:
                raise _refusal(option, host, port, error) from None
            self._sockets.push(sockets.pop_all())
        self._ports.add(number)
        return int(number)

    def keep_each(self, host: str, asked: Mapping[str, int]) -> dict[str, int]:
        """Keep a port for each server: those asked for first, so that no free one takes their place.

        Args:
            host: the address of all of them.
            asked: name of the server → port, 0 for any free one. The option's name is `--NAME-port`.
        """
        first = sorted(asked, key=lambda name: asked[name] == 0)
        return {name: self.keep(f"--{name}-port", host, asked[name]) for name in first}

    def keep_preferred(self, option: str, host: str, preferred: int) -> int:
        """Keep the preferred port if it is free, else any."""
        with contextlib.suppress(ConfigError, StartupError):
            return self.keep(option, host, preferred)
        return self.keep(option, host, 0)


def _bound_socket(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        # Servers set it too, so that connections in TIME_WAIT do not matter.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def _claim(address: str, port: int) -> socket.socket:
    """Return a socket whose name says that this process has the port.

    Raises:
        OSError: another process says so, of this address or of one that includes it or is a part of it.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(_claim_name(address, port))
    except OSError as error:
        # A sandbox may have no such sockets; then there is no claim.
        is_taken = error.errno == errno.EADDRINUSE
    else:
        others = _claimed_addresses(port) - {address}
        is_taken = bool(others) and not _EVERYWHERE.isdisjoint({address, *others})
    if is_taken:
        claim.close()
        raise OSError(errno.EADDRINUSE, "another `naiad serve` has it")
    return claim


def _claim_name(address: str, port: int) -> str:
    return f"\0{_CLAIM}{port}-{address}"


def _claimed_addresses(port: int) -> set[str]:
    """The addresses where processes of this network namespace say that they have the port."""
    try:
        lines = _UNIX_SOCKETS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    beginning = f"@{_CLAIM}{port}-"
    names = (line.split()[-1] for line in lines if beginning in line)
    return {name.removeprefix(beginning) for name in names if name.startswith(beginning)}


def _refusal(option: str, host: str, port: int, error: Exception) -> StartupError:
    # What is no name at all is a ValueError, mostly a UnicodeError.
    is_no_name = isinstance(error, ValueError)
    reason = "it is no host name" if is_no_name else getattr(error, "strerror", None) or str(error)
    if port == 0 or is_no_name or isinstance(error, socket.gaierror):
        named = "--openai-host" if option == "--openai-port" else "--host"
        return StartupError(f"{named} {host} is not an address of this machine ({reason}): use 127.0.0.1")
    return StartupError(
        f"{option} {port} on {host} can not be used ({reason}): "
        "stop what listens there, or choose another port"
    )
