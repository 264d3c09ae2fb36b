"""Fuzzes the readers of `helpers.byte_readers`, guided by the lines that the bytes reach.

    make fuzz-readers ARGS="[NAME …] [--runs 1000000] [--seconds 7200]"

Each reader is fuzzed in a process of its own by atheris. Its corpus begins with its seeds and with what
earlier runs have kept in tests/faults/corpus, and at the end the inputs that reach all its lines are kept
there. An input that a reader neither reads nor refuses is written to build/fuzz/NAME/failing and ends that
reader's run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
CORPUS = TESTS / "faults" / "corpus"
BUILD = TESTS.parent / "build" / "fuzz"
# What a process may hold, a reader's libraries included.
MAX_MEMORY_MB = 4096
MAX_INPUT_BYTES = 8192
MAX_INPUT_S = 20
# Of each reader, smallest inputs first.
MAX_KEPT_BYTES = 256 << 10
_EXECUTIONS = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_COVERAGE = re.compile(r"cov: (\d+)")


def main() -> int:
    """Fuzz each reader, keep its corpus, print a table."""
    args = _parse()
    if args.child:
        return _fuzz_in_this_process(args.names[0], args.rest)
    rows = [_fuzz(name, args) for name in args.names or _names()]
    print(f"{'reader':14}{'executions':>12}{'seconds':>9}{'lines':>7}{'kept':>6}  result")
    for row in rows:
        print("{name:14}{executions:>12,}{seconds:>9.0f}{lines:>7}{kept:>6}  {result}".format(**row))
    (BUILD / "last.json").write_text(json.dumps(rows, indent=1))
    return int(any(row["result"] != "clean" for row in rows))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make fuzz-readers", allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a reader; all of them if there is none")
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs for each reader")
    parser.add_argument("--seconds", type=int, default=7200, help="end a reader's run after that time")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args, args.rest = parser.parse_known_args()
    if args.rest and not args.child:
        parser.error(f"unknown arguments: {' '.join(args.rest)}")
    # The child imports the readers where their lines are watched.
    if not args.child and (unknown := set(args.names) - set(_names())):
        parser.error(f"no reader {sorted(unknown)[0]!r}: expected one of {', '.join(_names())}")
    return args


def _names() -> list[str]:
    from helpers.byte_readers import READERS

    return list(READERS)


def _fuzz(name: str, args: argparse.Namespace) -> dict[str, Any]:
    folder = BUILD / name
    found = folder / "found"
    shutil.rmtree(folder / "failing", ignore_errors=True)
    for data in _kept(name):
        _write(found, data)
    begin = [sys.executable, __file__, "--child", name, f"-rss_limit_mb={MAX_MEMORY_MB}"]
    limits = [f"-max_len={MAX_INPUT_BYTES}", f"-timeout={MAX_INPUT_S}", f"-artifact_prefix={folder}/"]
    ends = [f"-runs={args.runs}", f"-max_total_time={args.seconds}", "-print_final_stats=1"]
    begun_s = time.monotonic()
    code, log = _run([*begin, *limits, *ends, str(found)], folder / "log")
    seconds = time.monotonic() - begun_s
    executions, lines = _EXECUTIONS.search(log), _COVERAGE.findall(log)
    print(f"{name}: {'clean' if code == 0 else f'an input in {folder}'}", flush=True)
    return {
        "name": name,
        "executions": int(executions[1]) if executions else 0,
        "seconds": seconds,
        "lines": int(lines[-1]) if lines else 0,
        "kept": _keep(name, [*begin, *limits], folder),
        "result": "clean" if code == 0 else f"exit {code}, see {folder / 'log'}",
    }


def _run(command: list[str], log: Path) -> tuple[int, str]:
    """Run a command; return its code, and the end of what it wrote."""
    with log.open("wb") as file, tempfile.TemporaryDirectory(prefix="naiad-fuzz-") as scratch:
        # libFuzzer ends the process without its exit handlers.
        environment = {**os.environ, "TMPDIR": scratch}
        done = subprocess.run(command, stdout=file, stderr=file, env=environment, check=False)
    return done.returncode, log.read_text(errors="replace")[-20_000:]


def _kept(name: str) -> list[bytes]:
    from helpers.byte_readers import READERS

    path = CORPUS / f"{name}.zip"
    kept = READERS[name].make_seeds()
    if path.exists():
        with zipfile.ZipFile(path) as file:
            kept += [file.read(each) for each in file.namelist()]
    return kept


def _keep(name: str, command: list[str], folder: Path) -> int:
    """Write the smallest inputs that reach all lines; return their number."""
    least = folder / "least"
    shutil.rmtree(least, ignore_errors=True)
    least.mkdir()
    _run([*command, "-merge=1", str(least), str(folder / "found")], folder / "merge.log")
    inputs = sorted((path.read_bytes() for path in least.iterdir()), key=lambda data: (len(data), data))
    if not inputs:
        return 0
    CORPUS.mkdir(exist_ok=True)
    num_bytes = num_kept = 0
    with zipfile.ZipFile(CORPUS / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for data in inputs:
            num_bytes += len(data)
            if num_bytes > MAX_KEPT_BYTES:
                break
            # The same inputs make the same file.
            file.writestr(zipfile.ZipInfo(sha256(data).hexdigest()[:16]), data, zipfile.ZIP_DEFLATED)
            num_kept += 1
    return num_kept


def _write(folder: Path, data: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / sha256(data).hexdigest()).write_bytes(data)


def _fuzz_in_this_process(name: str, options: list[str]) -> int:
    import atheris

    # Only our own lines lead to new inputs; what is imported before it is not watched.
    import gguf
    import torch
    import transformers

    del gguf, torch, transformers
    with atheris.instrument_imports(include=["naiad", "naiad_client"]):
        from helpers.byte_readers import READERS
    read = READERS[name].read

    def read_or_keep(data: bytes) -> None:
        try:
            read(data)
        except BaseException:
            _write(BUILD / name / "failing", data)
            raise

    # To merge, libFuzzer runs this again by a shell.
    again = f"{sys.executable} {__file__} --child {name}"
    atheris.Setup([again, *options], read_or_keep, enable_python_coverage=True)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(TESTS))
    sys.exit(main())
