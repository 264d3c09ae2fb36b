"""Measures how the JSON schemas of a corpus are compiled and followed, beside xgrammar where it is installed.

    python -m perf.engine.schema_bench --data DIR [--per-group 100 --texts 5 --limit-s 10]

DIR has a folder of schemas for each group, as `data` of JSONSchemaBench, or files with a schema and
instances, as its `maskbench/data`. Each schema is compiled, its first mask is filled, and then one more
after each token of a valid instance or, without one, of a random text that the masks allow. That happens in
a process of its own, which ends at a limit of a core's time. All times are a core's time, so that other
programs do not matter much. With `--texts` the model writes that many texts for each group; each that ends by
itself must be valid, or the run fails.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import multiprocessing
import random
import re
import resource
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import jsonschema
import numpy as np
import numpy.typing as npt
from perf.common.percentile import percentile
from perf.common.report import print_rows, write_report

from naiad.cli.argument_types import at_least
from naiad.cli.bench.throughput import load_engine
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.config import EngineConfig, ModelConfig
from naiad.errors import InvalidRequestError
from naiad.grammar import Grammars
from naiad.grammar.compiling import compile_text
from naiad.grammar.json_schema import drop_unknown_keywords
from naiad.grammar.vocabulary import Tokens
from naiad.sequence import EngineRequest, FinishReason, GrammarKind, GrammarSpec, SamplingParams
from naiad.tokenization import Tokenizer
from naiad.tokenization.text_decoder import decode

_PROMPT = "<|im_start|>user\nWrite an example as JSON.<|im_end|>\n<|im_start|>assistant\n"
_MOST_TOKENS = 512
_MOST_MASKS = 256
_RANDOM_TOKENS = 32
# How a process ends that has used up its processor time.
_AT_LIMIT = (-signal.SIGXCPU, -signal.SIGKILL)
_NUMBER = re.compile(r"[_-]*\d+$")
# How a refusal of this begins, from `naiad.grammar.json_schema`.
_UNKNOWN_KEYWORD = "unknown keyword"

Row = dict[str, Any]
Words = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Case:
    """A schema, its group, and a text that is valid under it; empty: none is known."""

    group: str
    schema: str
    instance: str


@dataclass(slots=True)
class Figures:
    """What one library has done with the schemas of one group, or with one of them."""

    num_compiled: int = 0
    num_without_end: int = 0
    num_crashed: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    mask_s: list[float] = field(default_factory=list)
    num_instances: int = 0
    num_accepted: int = 0

    def add(self, other: Figures) -> None:
        """Take in what it has done with more schemas."""
        self.num_compiled += other.num_compiled
        self.num_without_end += other.num_without_end
        self.num_crashed += other.num_crashed
        self.refusals += other.refusals
        self.first_s += other.first_s
        self.mask_s += other.mask_s
        self.num_instances += other.num_instances
        self.num_accepted += other.num_accepted

    def row(self, group: str, library: str) -> Row:
        """As a row of the table."""
        first, masks = self.first_s or [0.0], self.mask_s or [0.0]
        return {
            "group": group,
            "library": library,
            "compiled": self.num_compiled,
            "refused": sum(self.refusals.values()),
            "for an unknown keyword": sum(
                count for reason, count in self.refusals.items() if _UNKNOWN_KEYWORD in reason
            ),
            "past the limit": self.num_without_end,
            "crashed": self.num_crashed,
            "first mask p50 ms": round(1e3 * percentile(first, 50), 2),
            "p99 ms": round(1e3 * percentile(first, 99), 2),
            "mask p50 us": round(1e6 * percentile(masks, 50), 1),
            "p99 us": round(1e6 * percentile(masks, 99), 1),
            "instances": f"{self.num_accepted}/{self.num_instances}",
        }


class Follower(Protocol):
    """A text in its grammar."""

    def mask(self) -> Words:
        """Return the bitmask of the next token."""

    def accept(self, token_id: int) -> bool:
        """Take in a token; return whether it is allowed."""


class Library(Protocol):
    """Something that compiles schemas."""

    name: str

    def compile(self, schema: str) -> Follower:
        """Compile a schema.

        Raises:
            ValueError: it is refused.
        """


def main() -> int:
    """Measure, print and write the figures."""
    args = _parse()
    if args.data is None:
        print("skipped: --data DIR names a checkout of JSONSchemaBench, which is not part of this repository")
        return 0
    model_dir = resolve_model(args.model)
    cases = list(read_cases(args.data, args.per_group))
    if not cases:
        raise SystemExit(f"--data {args.data}: no *.json in it")
    libraries: list[Library] = [_Naiad(model_dir), _Lenient(model_dir)]
    if importlib.util.find_spec("xgrammar") is None:
        print("without xgrammar, which is not installed")
    else:
        libraries.append(_XGrammar(model_dir))
    tokenizer = Tokenizer.from_directory(model_dir)
    rows = []
    for group in dict.fromkeys(case.group for case in cases):
        own = [case for case in cases if case.group == group]
        for library in libraries:
            figures = measure(library, own, tokenizer, args.limit_s)
            rows.append(figures.row(group, library.name))
            print(rows[-1], figures.refusals.most_common(3), flush=True)
    print_rows(rows)
    texts = _write_texts(model_dir, tokenizer, cases, args) if args.texts else []
    if texts:
        print_rows(texts)
    print("written:", write_report("schema-bench", vars(args) | {"data": args.data.name}, [*rows, *texts]))
    return 0


def read_cases(folder: Path, per_group: int) -> Iterator[Case]:
    """Yield at most this many cases of each group, in the order of their files' names."""
    counts: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.json")):
        group = path.parent.name if path.parent != folder else _NUMBER.sub("", path.stem.split("---")[0])
        if counts[group] == per_group:
            continue
        counts[group] += 1
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or "tests" not in content:
            yield Case(group, json.dumps(content), "")
            continue
        valid = [each["data"] for each in content["tests"] if each["valid"]]
        instance = json.dumps(valid[0], ensure_ascii=False) if valid else ""
        yield Case(group, json.dumps(content["schema"]), instance)


def measure(library: Library, cases: list[Case], tokenizer: Tokenizer, limit_s: int) -> Figures:
    """Compile the schemas of a group and follow a text in each of them.

    Args:
        library: compiles.
        cases: the schemas.
        tokenizer: makes tokens of the texts.
        limit_s: seconds of a core's time for each schema.
    """
    figures = Figures()
    for case in cases:
        figures.add(_measured_apart(library, case, tokenizer, limit_s))
    return figures


def _measured_apart(library: Library, case: Case, tokenizer: Tokenizer, limit_s: int) -> Figures:
    """Measure one schema in a process, since no library can be stopped while it compiles."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)

    def measure_in_child(connection: Connection) -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
        connection.send(_measured(library, case, tokenizer))

    child = context.Process(target=measure_in_child, args=(writer,))
    child.start()
    writer.close()
    figures: Figures | None = None
    with contextlib.suppress(EOFError):
        figures = reader.recv()
    child.join()
    reader.close()
    if figures is not None:
        return figures
    is_at_limit = child.exitcode in _AT_LIMIT
    return Figures(num_without_end=int(is_at_limit), num_crashed=int(not is_at_limit))


def _measured(library: Library, case: Case, tokenizer: Tokenizer) -> Figures:
    figures = Figures()
    start_s = time.thread_time()
    try:
        follower = library.compile(case.schema)
        mask = follower.mask()
    except ValueError as error:
        figures.refusals[str(error)[:120]] += 1
        return figures
    figures.first_s.append(time.thread_time() - start_s)
    figures.num_compiled += 1
    ids = tokenizer.encode(case.instance, False)[:_MOST_MASKS] if case.instance else None
    is_accepted = _follow(follower, mask, ids, random.Random(3), figures)
    if ids is not None:
        figures.num_instances += 1
        figures.num_accepted += is_accepted
    return figures


def _follow(
    follower: Follower, mask: Words, ids: list[int] | None, rng: random.Random, figures: Figures
) -> bool:
    """Follow a text, or a random one; return whether it is allowed to its end."""
    for place in range(_RANDOM_TOKENS if ids is None else len(ids)):
        token_id = _random_token(mask, rng) if ids is None else ids[place]
        if not follower.accept(token_id):
            return False
        start_s = time.thread_time()
        mask = follower.mask()
        figures.mask_s.append(time.thread_time() - start_s)
        if not mask.any():
            return ids is None
    return True


def _random_token(mask: Words, rng: random.Random) -> int:
    allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0]
    return int(allowed[rng.randrange(len(allowed))])


class _Naiad:
    """Compiles as the engine does, without the process that tries each grammar first."""

    name = "naiad"

    def __init__(self, model_dir: Path) -> None:
        config = ModelConfig.from_directory(model_dir)
        self._grammars = Grammars(model_dir, config.vocab_size, config.eos_token_ids)
        self._tokenizer = self._grammars.tokenizer
        self._filler = self._grammars.mask_filler()

    def compile(self, schema: str) -> Follower:
        _, matcher = compile_text(_spec(schema), Tokens(self._tokenizer, {}))
        filler = self._filler

        class Text:
            def mask(self) -> Words:
                masks = filler.empty_masks(1)
                filler.fill(masks, {0: matcher})
                words: Words = masks[0]
                return words

            def accept(self, token_id: int) -> bool:
                matcher.advance([token_id])
                return not matcher.error

        return Text()


class _Lenient(_Naiad):
    """The same for schemas whose unknown keywords are dropped, as `--openai-lenient` does."""

    name = "naiad, lenient"

    def compile(self, schema: str) -> Follower:
        parsed = json.loads(schema)
        drop_unknown_keywords(parsed)
        return super().compile(json.dumps(parsed))


class _XGrammar:
    """The same with xgrammar, on one thread and without its cache of compiled grammars."""

    name = "xgrammar"

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoTokenizer

        self._xgrammar: Any = importlib.import_module("xgrammar")
        self._vocab_size = ModelConfig.from_directory(model_dir).vocab_size
        info = self._xgrammar.TokenizerInfo.from_huggingface(
            AutoTokenizer.from_pretrained(model_dir), vocab_size=self._vocab_size
        )
        self._compiler = self._xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: str) -> Follower:
        try:
            compiled = self._compiler.compile_json_schema(schema, any_whitespace=False)
        except Exception as error:  # noqa: BLE001 — the library raises errors of many kinds
            raise ValueError(str(error)) from None
        matcher = self._xgrammar.GrammarMatcher(compiled)
        bitmask = self._xgrammar.allocate_token_bitmask(1, self._vocab_size)

        class Text:
            def mask(self) -> Words:
                if matcher.is_terminated():
                    return np.zeros(1, dtype=np.int32)
                matcher.fill_next_token_bitmask(bitmask)
                words: Words = bitmask[0].numpy()
                return words

            def accept(self, token_id: int) -> bool:
                return bool(matcher.accept_token(token_id))

        return Text()


def _write_texts(
    model_dir: Path, tokenizer: Tokenizer, cases: list[Case], args: argparse.Namespace
) -> list[Row]:
    """Let the model write texts for the first schemas of each group.

    Raises:
        SystemExit: a text that ended by itself is not valid.
    """
    config = EngineConfig(model_dir=str(model_dir), dtype=args.dtype, max_num_seqs=32, drafter="none")
    engine, _ = load_engine(config)
    prompt = tokenizer.encode(_PROMPT, False)
    ends = tuple(engine.model_config.eos_token_ids)
    asked: dict[int, Case] = {}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for number, case in enumerate(cases):
        if counts[case.group]["asked"] == args.texts:
            continue
        params = SamplingParams(
            max_tokens=_MOST_TOKENS,
            temperature=1.0,
            seed=number,
            grammar=_spec(case.schema),
            stop_token_ids=ends,
        )
        try:
            engine.add_request(EngineRequest(sequence_id=number, prompt_token_ids=prompt, params=params))
        except InvalidRequestError:
            continue
        asked[number] = case
        counts[case.group]["asked"] += 1
    ids: dict[int, list[int]] = defaultdict(list)
    while engine.has_work:
        for output in engine.step():
            ids[output.sequence_id] += output.token_ids
            if output.finish_reason is not None:
                case = asked[output.sequence_id]
                counts[case.group][output.finish_reason.value] += 1
                if output.finish_reason is FinishReason.STOP:
                    _check(decode(tokenizer.table, ids[output.sequence_id], skip_special_tokens=True), case)
    return [
        {"group": group, "texts": found["asked"], "ended and valid": found[FinishReason.STOP.value]}
        | {"cut": found[FinishReason.LENGTH.value], "failed": found[FinishReason.ERROR.value]}
        for group, found in counts.items()
    ]


def _check(text: str, case: Case) -> None:
    try:
        jsonschema.validate(json.loads(text), json.loads(case.schema))
    except (ValueError, jsonschema.ValidationError) as error:
        raise SystemExit(f"{case.group}: not valid under {case.schema}: {text!r}: {error}") from error


def _spec(schema: str) -> GrammarSpec:
    return GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source=schema)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="the corpus; without it nothing is measured")
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--per-group", type=at_least(1), default=100, metavar="N", help="schemas of a group")
    parser.add_argument(
        "--limit-s", type=at_least(1), default=10, metavar="N", help="a core's time for each schema"
    )
    parser.add_argument(
        "--texts", type=at_least(0), default=5, metavar="N", help="that the model writes a group"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
