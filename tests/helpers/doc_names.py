"""Finds names in Markdown pages that refer to things of this project that do not exist."""

from __future__ import annotations

import functools
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Options of other programs that the pages mention.
OTHERS_OPTIONS = frozenset(
    {
        *("--build-arg", "--shm-size", "--no-cache-dir", "--extra-index-url"),
        *("--http-max-input-size", "--http-restricted-api", "--grpc-restricted-protocol"),
        *("--model-control-mode", "--trace-config", "--exit-timeout-secs", "--model-repository"),
        *("--backend", "--tokenizer", "--logits-post-processor-name"),
    }
)
OTHERS_NAMES = frozenset(
    {
        "triton_grpc_error",
        "is_ready",
        "version_policy",
        "tritonclient",
        "generate_stream",
        "tensorrt_llm",
        "tensorrt_llm_bls",
        "inflight_batcher_llm",
        "tool_choice",
        "tool_calls",
        "LengthFinishReasonError",
        "generateText",
        "streamText",
    }
)

_FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
_CELL_BORDER = re.compile(r"(?<!\\)\|")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_MAKE = re.compile(r"\bmake ([a-z][a-z-]*)")
_LOAD_TOOLS = (
    *("triton_share", "processor_time", "perf_analyzer", "locust_run", "replay", "genai_perf"),
    *("openai", "spans", "dashboard"),
)
_MODULE = re.compile(r"(?<![\w./-])(?:naiad|naiad_kernels|naiad_client|perf|deploy)(?:\.[A-Za-z_]\w*)+")
_PATH = re.compile(r"[\w.-]+(?:/[\w.*-]+)+/?|[\w-]+\.(?:py|md|toml)")
_IDENTIFIER = re.compile(r"[A-Za-z]\w*")
# `locust --help` answers before it has read the file.
_PRINT_LOCUST_OPTIONS = (
    "from locust.argument_parser import get_parser; import perf.server.locustfile; get_parser().print_help()"
)
_ENGINE_BENCHES = ("cpu_kernels", "schema_bench", "speculation", "start", "whole_model")
_COMMANDS: dict[str, tuple[str, ...]] = {
    "serve": ("naiad.cli.main", "serve"),
    "naiad openai": ("naiad.cli.main", "openai"),
    **{
        f"repository {action}": ("naiad.cli.main", "repository", action)
        for action in ("create", "add", "remove", "list", "check")
    },
    "fetch-model": ("naiad.cli.main", "fetch-model"),
    "quantize": ("naiad.cli.main", "quantize"),
    "plan": ("naiad.cli.main", "plan"),
    "naiad replay": ("naiad.cli.main", "replay"),
    "naiad report": ("naiad.cli.main", "report"),
    "throughput": ("naiad.cli.main", "bench", "throughput"),
    "naiad": ("naiad.cli.main",),
    "naiad_client": ("naiad_client",),
    **{name: (f"perf.server.{name}",) for name in _LOAD_TOOLS},
    "peers": ("perf.peers.bench",),
    "suites": ("perf.suites.run",),
    **{name: (f"perf.engine.{name}",) for name in _ENGINE_BENCHES},
    "kernels bench": ("perf.kernels.bench",),
    "proxy": ("deploy.proxy",),
    "manifests": ("deploy.manifests",),
    "cluster measure": ("perf.cluster.measure",),
    "cluster": ("perf.cluster.simulate",),
    "cluster check": ("perf.cluster.check",),
    "soak": ("perf.server.soak",),
}
# One process for all commands: most of its time is what they import.
_PRINT_HELP = """
import contextlib, io, json, runpy, sys
for name, (module, *words) in json.loads(sys.argv[1]).items():
    sys.argv = [module, *words, "--help"]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        assert not end.code, (name, end.code)
    print(json.dumps([name, printed.getvalue()]))
"""
_COMMAND_OF_LINE = (
    (re.compile(r"\bnaiad serve\b|\bmake serve\b|\"naiad\", \"serve\""), "serve"),
    (re.compile(r"\bnaiad fetch-model\b"), "fetch-model"),
    (re.compile(r"\bnaiad quantize\b"), "quantize"),
    (re.compile(r"\bnaiad plan\b"), "plan"),
    (re.compile(r"\bnaiad replay\b"), "naiad replay"),
    (re.compile(r"\bnaiad report\b"), "naiad report"),
    *(
        (re.compile(rf"\bnaiad repository {action}\b"), f"repository {action}")
        for action in ("create", "add", "remove", "list", "check")
    ),
    (re.compile(r"\bnaiad bench throughput\b"), "throughput"),
    (re.compile(r"-m naiad_client\b"), "naiad_client"),
    (re.compile(r"\blocust -f "), "locust"),
    *((re.compile(rf"-m perf\.server\.{name}\b"), name) for name in _LOAD_TOOLS),
    (re.compile(r"\bmake bench-peers\b|-m perf\.peers\.bench\b"), "peers"),
    (re.compile(r"-m perf\.suites\.run\b"), "suites"),
    *((re.compile(rf"-m perf\.engine\.{name}\b"), name) for name in _ENGINE_BENCHES),
    (re.compile(r"-m perf\.kernels\.bench\b"), "kernels bench"),
    (re.compile(r"\bmake deploy-(?:envoy|haproxy)\b|-m deploy\.proxy\b"), "proxy"),
    (re.compile(r"-m deploy\.manifests\b"), "manifests"),
    (re.compile(r"-m perf\.cluster\.measure\b"), "cluster measure"),
    (re.compile(r"-m perf\.cluster\.simulate\b"), "cluster"),
    (re.compile(r"-m perf\.cluster\.check\b"), "cluster check"),
    (re.compile(r"-m perf\.server\.soak\b"), "soak"),
)
_SOURCES = ("backend_src", "kernels", "client", "model_repository", "perf", "tests", "deploy")
_WITH_NAMES = (".py", ".pbtxt", ".yaml", ".j2")


@dataclass(frozen=True)
class Page:
    """A Markdown page: where it is, and its text."""

    path: Path
    text: str

    @property
    def code(self) -> list[str]:
        """Lines of fenced code (continued lines joined), and the code spans."""
        blocks = [block.replace("\\\n", " ") for block in _FENCE.findall(self.text)]
        plain = _FENCE.sub("", self.text)
        return [line for block in blocks for line in block.splitlines()] + self.spans(plain)

    @property
    def names(self) -> list[str]:
        """The code spans outside of fenced code."""
        return self.spans(_FENCE.sub("", self.text))

    @staticmethod
    def spans(text: str) -> list[str]:
        """The texts between backticks."""
        return [span.strip() for span in _SPAN.findall(text)]


def pages() -> list[Page]:
    """README.md, perf/README.md and everything under docs/."""
    paths = [ROOT / "README.md", ROOT / "perf" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [Page(path, path.read_text()) for path in paths]


def missing_names(page: Page) -> list[str]:
    """Everything on the page that looks like a name of ours but does not exist."""
    found = [
        *_missing_links(page),
        *(name for code in page.code for name in _missing_in_code(code)),
        *(name for name in page.names if not _path_exists(name, page)),
        *(name for name in page.names if not _identifier_exists(name)),
    ]
    return sorted(set(found))


def _missing_in_code(code: str) -> Iterator[str]:
    options = _OPTION.findall(code)
    yield from (option for option in options if option not in _options_known_to(code))
    yield from (f"make {target}" for target in _MAKE.findall(code) if target not in _make_targets())
    yield from (name for name in _MODULE.findall(code) if not _is_importable(name))


def _missing_links(page: Page) -> Iterator[str]:
    return (target for target in _LINK.findall(page.text) if "://" not in target and not _leads(target, page))


def _leads(target: str, page: Page) -> bool:
    """Whether there is what a link of the page leads to."""
    name, _, anchor = target.partition("#")
    other = page.path.parent / name
    if name and not other.exists():
        return False
    return not anchor or anchor in _anchors(other.read_text() if name else page.text)


def _anchors(text: str) -> set[str]:
    """What links to the headings of a page are called, as GitHub makes them."""
    headings = _HEADING.findall(_FENCE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def uneven_rows(page: Page) -> list[str]:
    """The rows of tables that have not as many cells as the row before them."""
    lines = _FENCE.sub("", page.text).splitlines()
    return [
        line
        for before, line in pairwise(lines)
        if before.startswith("|") and line.startswith("|") and _num_borders(before) != _num_borders(line)
    ]


def _num_borders(row: str) -> int:
    return len(_CELL_BORDER.findall(row))


def _path_exists(name: str, page: Page) -> bool:
    """Whether a path exists; text that is not a path, or not in a folder of ours, passes."""
    if not _PATH.fullmatch(name):
        return True
    first = name.partition("/")[0]
    if "/" not in name:
        return (ROOT / name).exists() or (page.path.parent / name).exists() or bool(_source_files(name))
    # What is built is not there on a clean checkout.
    if first == "build" or not (ROOT / first).is_dir():
        return True
    return any(ROOT.glob(name.rstrip("/")))


def _identifier_exists(name: str) -> bool:
    """Whether a name in snake_case or CamelCase occurs in our sources; other words pass."""
    is_ours = _IDENTIFIER.fullmatch(name) and ("_" in name or re.search(r"[a-z][A-Z]", name))
    return not is_ours or name in OTHERS_NAMES or name in _source_words()


def _options_known_to(code: str) -> frozenset[str]:
    commands = [command for pattern, command in _COMMAND_OF_LINE if pattern.search(code)]
    if commands:
        return frozenset().union(*(_help_options(command) for command in commands)) | {"--extra-index-url"}
    return OTHERS_OPTIONS.union(*_options_of_commands().values(), _options_of_locust())


def _help_options(command: str) -> frozenset[str]:
    return _options_of_locust() if command == "locust" else _options_of_commands()[command]


@functools.cache
def _options_of_commands() -> dict[str, frozenset[str]]:
    lines = _printed("-c", _PRINT_HELP, json.dumps(_COMMANDS)).splitlines()
    return {name: frozenset(_OPTION.findall(text)) for name, text in map(json.loads, lines)}


@functools.cache
def _options_of_locust() -> frozenset[str]:
    return frozenset(_OPTION.findall(_printed("-c", _PRINT_LOCUST_OPTIONS)))


def _printed(*words: str) -> str:
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


@functools.cache
def _make_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@functools.cache
def _is_importable(name: str) -> bool:
    if name.startswith(("perf.", "deploy.")):
        path = ROOT.joinpath(*name.split("."))
        return path.is_dir() or path.with_suffix(".py").is_file()
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


@functools.cache
def _source_files(name: str) -> tuple[Path, ...]:
    return tuple(path for folder in _SOURCES for path in (ROOT / folder).rglob(name))


@functools.cache
def _source_words() -> frozenset[str]:
    words: set[str] = set()
    for folder in _SOURCES:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in _WITH_NAMES and path.name not in ("doc_names.py", "test_doc_names.py"):
                words |= set(re.findall(r"\w+", path.read_text()))
    return frozenset(words)
