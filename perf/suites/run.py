"""Runs another project's tests of an OpenAI server against Naiad's, and prints what became of them.

`python -m perf.suites.run --kind triton --suite server/python/openai --python ENVIRONMENT/bin/python`

The tests and their conftest files are used as they are. The environment needs `pytest`, `pytest-asyncio`,
`openai`, and what the suite's files import: for Triton's suite numpy and FastAPI, for vLLM's vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from perf.suites import variables
from perf.suites.checkpoints import make_base, make_hub, make_tool_model
from perf.suites.kinds import KINDS, Kind
from perf.suites.outcomes import Outcomes, read_record
from perf.suites.reasons import REASONS

from naiad.cli.checkpoints.fetch import resolve_model

# A small model's chat may go on until the window is full, so the window is small. With drafts the number of
# chunks, and the usage, depend on what ran before; tests compare two streams.
_SERVE = ("--max-model-len", "512", "--max-num-batched-tokens", "128", "--drafter", "none")
# Clients that fixtures share between tests live in one event loop.
_SETTINGS = """[pytest]
asyncio_default_fixture_loop_scope = session
asyncio_default_test_loop_scope = session
"""
_ROOT = Path(__file__).parents[2]
_VERSIONS = (
    "import importlib.metadata as m, sys; print(sys.version.split()[0], *(f'{n} {m.version(n)}' for n in %r))"
)


def main() -> int:
    """Run a suite; return 1 if a test has failed for no known reason."""
    args = _parse()
    kind: Kind = KINDS[args.kind]
    reasons = REASONS[kind.name]
    suite = Path(args.suite).resolve()
    revision = args.revision or revision_of(suite)
    checkpoint = resolve_model(args.model)
    with tempfile.TemporaryDirectory(prefix="naiad-suite-") as folder:
        work = Path(folder)
        (work / "tests").symlink_to(suite / "tests")
        (work / "pytest.ini").write_text(_SETTINGS, encoding="utf-8")
        make_hub(work / "hub", kind.checkpoints, checkpoint)
        for name in kind.caches:
            (work / name).symlink_to(work / "hub")
        make_base(work / "base", checkpoint)
        make_tool_model(work / "tools", checkpoint)
        environment = _environment(
            kind, work, checkpoint, [each.tests for each in reasons if each.says is None]
        )
        code = subprocess.run(
            _command(args.python, kind, work, args.pytest), cwd=work, env=environment, check=False
        ).returncode
        if code not in (0, 1):
            print(f"pytest ended with exit code {code}", file=sys.stderr)
            return code
        outcomes = Outcomes(read_record(work / "record"), reasons)
    print(f"\nThe {kind.name} suite, {revision}; {checkpoint.name}; {_versions(args.python)}\n")
    print(outcomes.by_file(), "\n\n", outcomes.by_reason(), sep="")
    if outcomes.failures:
        print("\nFailures without a known reason:\n", outcomes.shown_failures(), sep="\n")
    return int(bool(outcomes.failures))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="perf.suites.run", description=__doc__)
    add = parser.add_argument
    add("--kind", choices=KINDS, required=True, help="whose suite it is")
    add("--suite", metavar="DIR", required=True, help="the directory that holds the suite's folder tests")
    add("--revision", help="its commit or version (default: what git or PKG-INFO says)")
    add("--python", default=sys.executable, help="interpreter of the environment that the tests run in")
    add("--model", default="default", help="checkpoint to serve in the place of the tests' own models")
    add("pytest", nargs="*", help="after --: further arguments of pytest, such as -k NAME")
    return parser.parse_args()


def revision_of(suite: Path) -> str:
    """Return the suite's commit, or the version of the package that it is part of.

    Raises:
        SystemExit: it says neither.
    """
    information = suite / "PKG-INFO"
    if information.is_file():
        fields = dict(re.findall(r"^(Name|Version): (\S+)", information.read_text(encoding="utf-8"), re.M))
        return f"{fields['Name']} {fields['Version']}"
    asked = subprocess.run(
        ["git", "-C", str(suite), "log", "-1", "--format=commit %H"],
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode != 0:
        raise SystemExit(f"{suite} is no git checkout and has no PKG-INFO: name its commit with --revision")
    return asked.stdout.strip()


def _environment(kind: Kind, work: Path, checkpoint: Path, not_run: list[str]) -> dict[str, str]:
    serve = [sys.executable, "-m", "naiad.cli.main", "serve", *_SERVE]
    own = {
        variables.COMMAND: json.dumps(serve),
        variables.CHECKPOINT: str(checkpoint),
        variables.BASE_CHECKPOINT: str(work / "base"),
        variables.TOOL_CHECKPOINT: str(work / "tools"),
        variables.KIND: kind.name,
        variables.RECORD: str(work / "record"),
        variables.NOT_RUN: json.dumps(not_run),
        "PYTHONPATH": str(_ROOT),
        # Nothing is written into the suite.
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_CACHE": str(work / "hub"),
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(work),
    }
    more = {name: value.format(checkpoint=checkpoint) for name, value in (kind.environment or {}).items()}
    return os.environ | own | more


def _command(python: str, kind: Kind, work: Path, more: Sequence[str]) -> list[str]:
    top = work / "tests" / kind.top
    return [
        *(python, "-m", "pytest", "-p", "perf.suites.plugin", "-p", "no:cacheprovider"),
        *("-c", str(work / "pytest.ini"), "--rootdir", str(work), "--confcutdir", str(top)),
        *(
            "-q",
            "--tb=short",
            "--no-header",
            "--show-capture=no",
            "-W",
            "ignore",
            "--continue-on-collection-errors",
        ),
        *more,
        *(str(top / folder) for folder in kind.folders),
    ]


def _versions(python: str) -> str:
    names = ("pytest", "openai")
    asked = subprocess.run([python, "-c", _VERSIONS % (names,)], capture_output=True, text=True, check=True)
    return f"Python {asked.stdout.strip()}"


if __name__ == "__main__":
    sys.exit(main())
