"""The entry point of `naiad`, which imports next to nothing until Ctrl-C can be handled."""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code; Ctrl-C ends it without a traceback, also while it imports."""
    try:
        from naiad.cli.dispatch import dispatch

        return dispatch(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
