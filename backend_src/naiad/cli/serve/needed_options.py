"""Options of `naiad serve` that have an effect only with others: without these they are refused."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from naiad.cli.serve.exposure import has_gate
from naiad.errors import ConfigError
from naiad.openai_server.access.policy import is_loopback


@dataclass(frozen=True, slots=True)
class _Need:
    """What some options need.

    Attributes:
        options: their names.
        is_met: whether what they need is there.
        expected: says in the refusal what they need.
    """

    options: tuple[str, ...]
    is_met: Callable[[argparse.Namespace], bool]
    expected: str


def refuse_without_effect(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse an option that nothing would read; the value of its default counts as not given.

    Args:
        args: the values of all options.
        parser: has their defaults.

    Raises:
        ConfigError: what an option needs is not there.
    """
    for need in _NEEDS:
        for option in need.options:
            name = option.removeprefix("--").replace("-", "_")
            value = getattr(args, name)
            if value != parser.get_default(name) and not need.is_met(args):
                raise ConfigError(option, str(value) if isinstance(value, Path) else value, need.expected)


def _has_api(args: argparse.Namespace) -> bool:
    return args.openai_port is not None


def _has_gate(args: argparse.Namespace) -> bool:
    return has_gate(args, is_bundled=args.tritonserver is None)


_NEEDS = (
    _Need(
        (
            *("--openai-host", "--openai-allowed-host", "--openai-allowed-origin", "--openai-lenient"),
            *("--openai-fallback", "--openai-header-timeout-s", "--openai-reasoning", "--openai-tool-parser"),
        ),
        _has_api,
        "an --openai-port with it, not off",
    ),
    _Need(
        ("--metrics-open", "--expose-triton"),
        lambda args: args.api_keys is not None,
        "--api-keys FILE with it",
    ),
    _Need(
        ("--gate-allowed-host", "--gate-allowed-origin", "--gate-max-body-bytes", "--gate-max-connections"),
        _has_gate,
        "--gate on with it, or a --host that others can reach",
    ),
    _Need(
        ("--slow-reader-s",),
        lambda args: _has_api(args) or _has_gate(args),
        "an --openai-port with it, or the gate",
    ),
    _Need(
        ("--i-accept-known-holes",),
        lambda args: args.gate == "off" and not is_loopback(args.host),
        "--gate off with it, and a --host that others can reach",
    ),
    _Need(("--record-prompts",), lambda args: args.record is not None, "--record FILE with it"),
    _Need(
        ("--model-control-key",),
        lambda args: args.model_control_mode == "explicit",
        "--model-control-mode explicit with it",
    ),
)
