"""`naiad quantize`: writes a quantised copy of a checkpoint and reports what it lost."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from naiad.cli.argument_types import at_least
from naiad.cli.checkpoints.complete_directory import exclusive_lock, fill_directory
from naiad.cli.checkpoints.fetch import resolve_model
from naiad.cli.checkpoints.model_files import check_model_directory, weight_files
from naiad.cli.console import say
from naiad.cli.quantize.environment import default_environment, installed
from naiad.cli.quantize.scheme import BITS, FORMATS, GROUP_SIZES, METHODS, Scheme
from naiad.config import ModelConfig
from naiad.errors import ConfigError, StartupError
from naiad.tokenization.checkpoint_tokenizer import CheckpointTokenizer, encode_text

_WINDOW_TOKENS = 512
_CALIBRATION_WINDOWS = 256
# Prose and Python: pages and modules of Naiad.
TEXT = Path(__file__).with_name("text.txt")
_MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("model", metavar="DIR", help="the checkpoint: default, a directory or org/name[@revision]")
    add("out", type=Path, metavar="OUT", help="the new directory")
    add(
        "--method",
        choices=METHODS,
        default="rtn",
        help="rtn: round to nearest; gptq, awq: with llm-compressor, on --calibration (default: rtn)",
    )
    add("--format", choices=FORMATS, default=FORMATS[0], help="of the new checkpoint (default: %(default)s)")
    add("--bits", type=int, choices=BITS, default=4, help="of a weight (default: 4)")
    add(
        "--group-size",
        type=int,
        choices=GROUP_SIZES,
        default=None,
        help="inputs that share a scale, with four bits (default: 32); with eight bits all inputs do",
    )
    add("--symmetric", action="store_true", help="without zero points; eight bits never have any")
    add("--calibration", type=Path, metavar="FILE", help="a text like the model's work, for gptq and awq")
    add(
        "--environment",
        type=Path,
        default=default_environment(),
        metavar="FOLDER",
        help="where llm-compressor is installed for gptq and awq, once (default: %(default)s)",
    )
    add("--pip-args", default="", metavar="WORDS", help="further options of pip for that")
    add("--text", type=Path, metavar="FILE", help="the report's text (default: prose and Python of Naiad)")
    add(
        "--text-tokens",
        type=at_least(0),
        default=4096,
        metavar="N",
        help="how much of the text is measured; 0: nothing (default: 4096)",
    )
    add("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Quantise, then print the report.

    Raises:
        ConfigError: options do not go together.
        ModelError: the checkpoint is damaged, not supported or quantised already.
        StartupError: a file cannot be read or written, or llm-compressor cannot be installed.
    """
    scheme = _scheme(args)
    _check_calibration(args)
    if args.text_tokens == 1:
        # A token is measured by what is expected after it.
        raise ConfigError("--text-tokens", 1, "0 for no report, or at least 2 tokens")
    target = args.out.absolute()
    _refuse_taken(target)
    source = resolve_model(args.model, "DIR")
    _check_source(source)
    texts = _windows(source, args.text or TEXT, "--text", args.text_tokens)
    make = _maker(args, scheme, source)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(target, say):
            _refuse_taken(target)
            fill_directory(target, make)
    except OSError as error:
        reason = error.strerror or error
        raise StartupError(f"{target} cannot be written ({reason}): choose another OUT") from error
    say(f"written: {target}")
    print(_report(args, source, target, texts))
    return 0


def _scheme(args: argparse.Namespace) -> Scheme:
    if args.bits == 4:
        return Scheme(4, args.group_size or GROUP_SIZES[0], args.symmetric)
    if args.group_size:
        raise ConfigError("--group-size", args.group_size, "only with --bits 4: eight bits have no groups")
    if args.method == "awq":
        raise ConfigError("--bits", args.bits, "4 with --method awq")
    return Scheme(8, 0, True)


def _check_calibration(args: argparse.Namespace) -> None:
    if args.method == "rtn" and args.calibration:
        raise ConfigError("--calibration", str(args.calibration), "only with --method gptq or awq")
    if args.method != "rtn" and not args.calibration:
        raise ConfigError("--calibration", None, f"a text file, which --method {args.method} needs")


def _windows(source: Path, path: Path, option: str, num_tokens: int) -> list[list[int]]:
    """Cut the first tokens of a text into contexts that the model can have; 0 tokens: none.

    Raises:
        ConfigError: the text is shorter than two tokens.
        StartupError: the file cannot be read.
    """
    if not num_tokens:
        return []
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise StartupError(f"{option} {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise StartupError(f"{option} {path} is no text in UTF-8") from None
    window = min(_WINDOW_TOKENS, ModelConfig.from_directory(source).max_position_embeddings)
    ids = encode_text(CheckpointTokenizer.load(source).tokenizer, text, add_special_tokens=False)[:num_tokens]
    cut = [ids[start : start + window] for start in range(0, len(ids), window)]
    if len(ids) < 2:
        raise ConfigError(option, str(path), "a text of at least two tokens")
    return [each for each in cut if len(each) > 1]


def _check_source(source: Path) -> None:
    if source.is_file():
        raise ConfigError("DIR", str(source), "a directory with safetensors, not a GGUF file")
    quantised = ModelConfig.from_directory(source).quantised
    if quantised is not None:
        expected = f"a checkpoint in 16 or 32 bits; this one is quantised already ({quantised.method})"
        raise ConfigError("DIR", str(source), expected)
    check_model_directory(source)


def _refuse_taken(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError("OUT", str(target), "a directory that does not exist or is empty")


def _maker(args: argparse.Namespace, scheme: Scheme, source: Path) -> Callable[[Path], None]:
    # torch takes seconds to import, and wrong options are refused without it.
    if args.method == "rtn":
        from naiad.cli.quantize.checkpoint_copy import copy_rounded

        return lambda directory: copy_rounded(source, directory, scheme, say)
    from naiad.cli.quantize.calibrated import copy_calibrated

    texts = _windows(source, args.calibration, "--calibration", _CALIBRATION_WINDOWS * _WINDOW_TOKENS)
    python = installed(args.environment, args.pip_args)
    return lambda directory: copy_calibrated(python, args.method, scheme, source, directory, texts)


def _report(args: argparse.Namespace, source: Path, target: Path, texts: Sequence[list[int]]) -> str:
    before, after = _weight_bytes(source), _weight_bytes(target)
    report: dict[str, Any] = {
        "method": args.method,
        "bits": args.bits,
        "out": str(target),
        "bytes_before": before,
        "bytes_after": after,
        **_figures(source, target, texts),
    }
    if args.json:
        return json.dumps(report)
    lines = [f"weights: {before / _MIB:.1f} MiB before, {after / _MIB:.1f} MiB after"]
    if texts:
        lines += [
            "over {num_tokens} tokens, both in float32:".format(**report),
            "perplexity {perplexity_before:.3f} before, {perplexity_after:.3f} after".format(**report),
            "KL {kl:.5f} nats a token, the most likely token the same for {same_token:.1%}".format(**report),
        ]
    return "\n".join(lines)


def _weight_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in weight_files(directory))


def _figures(source: Path, target: Path, texts: Sequence[list[int]]) -> dict[str, object]:
    if not texts:
        return {}
    from naiad.cli.quantize.quality import compared

    say(f"measuring {sum(map(len, texts))} tokens, before and after")
    before, after = compared(source, target, texts)
    return {
        "num_tokens": after.num_tokens,
        "perplexity_before": before.perplexity,
        "perplexity_after": after.perplexity,
        "kl": after.mean_kl,
        "same_token": after.same_fraction,
    }
