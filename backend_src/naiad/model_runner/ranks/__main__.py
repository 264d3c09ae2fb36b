"""The process of one rank: `python -m naiad.model_runner.ranks FD`.

FD is the file descriptor of one end of a socket pair. The process ends when the other end is closed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator

import torch

from naiad.errors import StartupError
from naiad.model_runner.channel import Channel
from naiad.model_runner.ranks.follower import Follower
from naiad.model_runner.ranks.messages import Failed, Loaded, StartRank, encoder, message_decoder
from naiad.parent_watch import end_with_parent

# The first rank ends as soon as any other one has.
_NOTICE_S = 1.0

logger = logging.getLogger(__name__)


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
        with _quiet_if_ranks_end(channel):
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


@contextlib.contextmanager
def _quiet_if_ranks_end(channel: Channel) -> Iterator[None]:
    """Leave it to the first rank to say that a rank has ended: all exchanges with that one fail."""
    try:
        yield
    except (EOFError, ConnectionError):
        raise
    except Exception:
        if not channel.ends_within(_NOTICE_S):
            raise
        logger.debug("the ranks have ended", exc_info=True)
        # The libraries would report their connections once more.
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
