"""`python -m naiad.cli.checkpoints.with_parent MODULE WORD…`: runs a module that ends with its parent."""

from __future__ import annotations

import runpy
import signal
import sys

from naiad.parent_watch import end_with_parent


def main() -> None:
    """Run the module; if the parent ends, end at once and in silence."""
    # Ctrl-C reaches the terminal's whole process group; the parent, which says so, ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(lambda: None)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
