"""`-m helpers.fake_side_server PORT`: listens, and prints a line when it is told to be not ready."""

from __future__ import annotations

import signal
import socket
import sys


def main() -> None:
    """Serve nothing until SIGTERM."""
    signal.signal(signal.SIGUSR1, lambda *_: print("beside: not ready", flush=True))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with socket.create_server(("127.0.0.1", int(sys.argv[1]))):
        # As the OpenAI server does when its handlers are there.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP, signal.SIGUSR1})
        while True:
            signal.pause()


if __name__ == "__main__":
    main()
