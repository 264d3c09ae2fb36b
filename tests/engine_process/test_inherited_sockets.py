from __future__ import annotations

import os
import socket
import subprocess
import sys

CHILD = """
import os, socket, sys
from naiad.inherited_sockets import close_inherited_sockets

own = socket.socket()
inherited, pipe = map(int, sys.argv[1:])
os.fstat(inherited)
close_inherited_sockets()
os.fstat(own.fileno()), os.fstat(pipe), os.fstat(0)
print("closed", flush=True)
sys.stdin.read()
"""


def test_only_inherited_sockets_are_closed() -> None:
    """Pipes, standard input and the process's own sockets stay; the other end sees its connection end."""
    here, there = socket.socketpair()
    reading, writing = os.pipe()
    with here, there:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(there.fileno()), str(writing)],
            pass_fds=(there.fileno(), writing),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        there.close()
        here.settimeout(60)
        assert here.recv(1) == b""
        assert child.stdout.readline() == b"closed\n"
        child.stdin.close()
        assert child.wait(60) == 0
        child.stdout.close()
    os.close(reading)
    os.close(writing)
