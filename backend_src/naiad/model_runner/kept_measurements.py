"""Measurements of one start that are valid for later starts on the same machine."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from naiad.model_runner import step_costs, token_budget
from naiad.models.checkpoint_cache import CheckpointCache
from naiad.models.whole_file import replace_file
from naiad_kernels.native.variants import cpu_flags, cpu_model

_LOG = logging.getLogger(__name__)
_FILE = "measurements.json"
_MAX_KEPT = 64
_Value = TypeVar("_Value")

Facts = dict[str, int | str]


class _Measurement(msgspec.Struct, frozen=True):
    facts: Facts
    value: msgspec.Raw
    sha256: str


class KeptMeasurements:
    """Measurements with a checkpoint, each with all facts that it depends on."""

    def __init__(
        self, cache: CheckpointCache | None, facts: Facts, wait: Callable[[], None] = lambda: None
    ) -> None:
        """Know what every measurement depends on.

        Args:
            cache: keeps the measurements; None: everything is measured anew.
            facts: beside the machine, the checkpoint and how is measured: threads, kernels, dtype and so on.
            wait: is called before something is measured; returns when nothing disturbs it any more.
        """
        self._cache = cache
        self._facts = facts
        self._wait = wait

    def get(self, name: str, kind: type[_Value], measure: Callable[[], _Value], facts: Facts) -> _Value:
        """Return a kept measurement, or measure and keep.

        Args:
            name: what is measured.
            kind: the value's type.
            measure: measures it.
            facts: what this measurement depends on besides.
        """
        if self._cache is None:
            return self._measured(measure)
        try:
            whole = {
                "measured": name,
                **_machine(),
                "checkpoint": self._cache.fingerprint,
                **self._facts,
                **facts,
            }
        except OSError as error:
            _LOG.warning("nothing that is measured is kept for the next start: %s", error)
            return self._measured(measure)
        for path in self._cache.find(_FILE):
            with contextlib.suppress(KeyError, ValueError, msgspec.DecodeError):
                return _value_of(_read(path)[_key(whole)], whole, kind)
        value = self._measured(measure)
        self._keep(whole, value)
        return value

    def _measured(self, measure: Callable[[], _Value]) -> _Value:
        self._wait()
        return measure()

    def _keep(self, facts: Facts, value: object) -> None:
        assert self._cache is not None
        folder = self._cache.folder
        if folder is None:
            return
        kept = _read(folder / _FILE)
        kept.pop(_key(facts), None)
        encoded = msgspec.json.encode(value)
        kept[_key(facts)] = _Measurement(facts, msgspec.Raw(encoded), hashlib.sha256(encoded).hexdigest())
        newest = dict(list(kept.items())[-_MAX_KEPT:])
        try:
            replace_file(folder / _FILE, msgspec.json.encode(newest), self._cache.file_mode)
        except OSError as error:
            _LOG.warning("what was measured is not kept for the next start: %s", error)


def _read(path: Path) -> dict[str, _Measurement]:
    """All that is kept in a file; nothing if it is missing or damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, _Measurement])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def _value_of(kept: _Measurement, facts: Facts, kind: type[_Value]) -> _Value:
    """Decode a value.

    Raises:
        ValueError: it is damaged.
    """
    if kept.facts != facts or hashlib.sha256(bytes(kept.value)).hexdigest() != kept.sha256:
        raise ValueError("the measurement is damaged")
    return msgspec.json.decode(kept.value, type=kind)


def _key(facts: Facts) -> str:
    return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()[:32]


def _machine() -> Facts:
    """This machine, and the code that measures."""
    digest = hashlib.sha256()
    for module in (step_costs, token_budget):
        assert module.__file__ is not None
        digest.update(Path(module.__file__).read_bytes())
    return {
        "cpu": f"{platform.machine()} {cpu_model()}",
        "cpu_flags": hashlib.sha256(" ".join(sorted(cpu_flags())).encode()).hexdigest()[:16],
        "code": digest.hexdigest()[:16],
    }
