"""`naiad replay`: plays recorded requests again on an engine of its own, and compares what they give."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from naiad.cli.checkpoints.fetch import resolve_model
from naiad.cli.console import say
from naiad.cli.engine_options import MODEL_HELP, add_engine_arguments, chosen_parameters
from naiad.cli.replay.differences import Difference, difference_of
from naiad.cli.replay.played import PlayedRequest, read_requests
from naiad.cli.replay.player import Played, Player
from naiad.config import EngineConfig
from naiad.config.model_location import text_of_path
from naiad.errors import ConfigError

_CLOSE_S = 5.0
_MODEL_DIR, _DRAFT, _INVARIANT = "model_dir", "draft_model", "batch_invariant"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add(
        "file",
        type=Path,
        metavar="FILE",
        help="what `naiad serve --record` has written, or a trace of Mooncake's or aiperf's format",
    )
    add("--model", default="default", metavar="NAME", help=f"{MODEL_HELP} (default: %(default)s)")
    add(
        "--speed",
        type=float,
        default=1.0,
        metavar="F",
        help="2: requests come twice as fast as they were recorded (default: %(default)s)",
    )
    add_engine_arguments(parser, "Of the engine that plays; it is batch-invariant unless told otherwise.")


def run(args: argparse.Namespace) -> int:
    """Play and print.

    Returns:
        1 if a request gave other tokens than recorded although the engine is batch-invariant, or failed.

    Raises:
        StartupError: the file, an option or the checkpoint is wrong.
    """
    if not args.speed > 0:
        raise ConfigError("--speed", args.speed, "a number > 0")
    requests = read_requests(args.file)
    config = EngineConfig.from_parameters(_parameters(args))
    begin_s, played = _play(config, requests, args.speed)
    print(_summary(played, time.monotonic() - begin_s), flush=True)
    return _compare(played, is_exact=config.batch_invariant)


def _parameters(args: argparse.Namespace) -> dict[str, str]:
    """The engine's settings, with the directories of its checkpoints."""
    directory = text_of_path(resolve_model(text_of_path(args.model)))
    parameters = {_INVARIANT: "true", **chosen_parameters(args), _MODEL_DIR: directory}
    if args.draft_model:
        parameters[_DRAFT] = text_of_path(resolve_model(parameters[_DRAFT], "--draft-model"), _DRAFT)
    return parameters


def _play(
    config: EngineConfig, requests: Sequence[PlayedRequest], speed: float
) -> tuple[float, Sequence[Played]]:
    # Imported here because the other commands do not need it.
    from naiad.engine_process import EngineClient

    player = Player()
    with tempfile.TemporaryDirectory(prefix="naiad-replay-") as folder:
        client = EngineClient(config, Path(folder) / "engine.sock", player.take_outputs, player.lose)
        client.start()
        try:
            fitting = _fitting(requests, client.info.max_model_len)
            begin_s = time.monotonic()
            return begin_s, player.play(client, fitting, client.info.vocab_size, speed)
        finally:
            client.close(_CLOSE_S)


def _fitting(requests: Sequence[PlayedRequest], max_model_len: int) -> list[PlayedRequest]:
    """The requests that the engine can serve; the others are named."""
    fitting = []
    for each in requests:
        num_prompt = each.lengths.num_tokens if each.lengths else len(each.request.prompt_token_ids)
        if num_prompt + each.request.params.max_tokens <= max_model_len or each.lengths is None:
            fitting.append(each)
    if len(fitting) < len(requests):
        num_long = len(requests) - len(fitting)
        say(f"{num_long} requests are left out: they have more than {max_model_len} tokens", "warning")
    if not fitting:
        raise ConfigError("--max-model-len", max_model_len, "room for at least one of the file's requests")
    return fitting


def _summary(played: Sequence[Played], seconds: float) -> str:
    num_tokens = sum(len(ids) for each in played for ids in each.token_ids)
    waits = [each.first_token_s - each.submitted_s for each in played if each.first_token_s is not None]
    first = f"; first token after {statistics.median(waits):.3f} s (median)" if waits else ""
    return (
        f"played {len(played)} requests in {seconds:.1f} s: {num_tokens} output tokens, "
        f"{num_tokens / seconds:.1f} tokens/s{first}"
    )


def _compare(played: Sequence[Played], *, is_exact: bool) -> int:
    failed = [each for each in played if each.errors]
    if failed:
        say(f"{len(failed)} requests failed; line {failed[0].asked.line}: {failed[0].errors[0]}", "warning")
    compared = [each for each in played if each.asked.expected]
    if not compared:
        print("nothing to compare with: the file has no prompts")
        return int(bool(failed))
    found = [
        difference
        for each in compared
        if (difference := difference_of(each.asked.line, each.asked.expected, each.token_ids))
    ]
    print(_sentence(len(compared), found))
    return int(bool(failed) or (bool(found) and is_exact))


def _sentence(num_compared: int, found: Sequence[Difference]) -> str:
    if not found:
        return f"all {num_compared} compared requests gave the same ids"
    first = min(found, key=lambda each: each.line)
    return f"{len(found)} of {num_compared} requests gave other ids; the first: {first}"
