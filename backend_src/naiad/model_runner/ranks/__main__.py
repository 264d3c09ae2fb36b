"""The process of one rank: `python -m naiad.model_runner.ranks FD`.

FD is the file descriptor of one end of a socket pair. The process ends when the other end is closed.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys

import torch

from naiad.errors import StartupError
from naiad.model_runner.channel import Channel
from naiad.model_runner.ranks.follower import Follower
from naiad.model_runner.ranks.messages import Failed, Loaded, StartRank, encoder, message_decoder
from naiad.parent_watch import end_with_parent


def main() -> int:
    """Follow the first rank until it closes its end of the socket pair."""
    logging.basicConfig(level=logging.INFO, format="naiad rank: %(levelname)s: %(message)s")
    # Ctrl-C reaches the terminal's whole process group; the first rank ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(lambda: None)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    with contextlib.suppress(EOFError, ConnectionError), torch.inference_mode():
        start = message_decoder.decode(channel.receive())
        assert isinstance(start, StartRank), "the first message starts the rank"
        try:
            follower = Follower.start(start)
        except StartupError as error:
            channel.send(encoder.encode(Failed(error.status, str(error))))
            # The end of a rank would end the first one before it has said why.
            channel.receive()
            return 1
        channel.send(encoder.encode(Loaded()))
        while True:
            follower.handle(message_decoder.decode(channel.receive()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
