"""Compiles large grammars in a process of its own first, which has limits of memory and time.

A thread that compiles cannot be ended. What this process survives is compiled once more where it is used.
"""

from __future__ import annotations

import resource
import subprocess
import sys

import msgspec

from naiad.grammar import limits
from naiad.sequence import GrammarSpec


class _Job(msgspec.Struct, frozen=True):
    spec: GrammarSpec
    marker_id: int | None


class _Result(msgspec.Struct, frozen=True):
    """The grammar in llguidance's form, or why it is refused."""

    text: str = ""
    error: str = ""


def translate_in_helper(spec: GrammarSpec, marker_id: int | None) -> str:
    """Translate a grammar as `to_llguidance` does, and try to compile it.

    Raises:
        ValueError: the grammar cannot be translated or compiled, or not within the limits.
    """
    job = msgspec.json.encode(_Job(spec, marker_id))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "naiad.grammar.helper"],
            input=job,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=limits.HELPER_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"it does not compile within {limits.HELPER_TIMEOUT_S:g} s") from None
    if done.returncode:
        most = limits.HELPER_MEMORY_BYTES >> 20
        raise ValueError(f"it does not compile within {most} MiB of memory and {limits.HELPER_TIMEOUT_S:g} s")
    result = msgspec.json.decode(done.stdout, type=_Result)
    if result.error:
        raise ValueError(result.error)
    return result.text


def _run(job: _Job) -> _Result:
    # Imported under the limits.
    from llguidance import LLMatcher

    from naiad.grammar.source import to_llguidance

    try:
        text = to_llguidance(job.spec, job.marker_id)
    except ValueError as error:
        return _Result(error=str(error))
    return _Result(text, LLMatcher.validate_grammar(text, limits=limits.parser_limits()))


def main() -> None:
    """Read a job from stdin and write its result to stdout."""
    resource.setrlimit(resource.RLIMIT_AS, (limits.HELPER_MEMORY_BYTES, limits.HELPER_MEMORY_BYTES))
    num_seconds = int(limits.HELPER_TIMEOUT_S)
    resource.setrlimit(resource.RLIMIT_CPU, (num_seconds, num_seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=_Job)
    sys.stdout.buffer.write(msgspec.json.encode(_run(job)))


if __name__ == "__main__":
    main()
