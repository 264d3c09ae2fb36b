"""Reads an object of config.json of which no key may be left over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from naiad.config.checkpoint_json import Json, bad_value, is_int

# Of GPTQ, and of AWQ in newer files: how the numbers were found, or how other programs multiply by them.
CALIBRATION_KEYS = (
    *("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse", "act_group_aware"),
    *("model_name_or_path", "model_file_base_name", "dataset", "tokenizer", "batch_size", "model_seqlen"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize"),
    *("pad_token_id", "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "backend"),
    *("max_input_length", "cache_block_outputs", "meta", "parallel_packing", "offload_to_disk"),
    *("offload_to_disk_path", "pack_impl", "v2", "gptaq"),
)


class Keys:
    """An object's keys; each is taken by whoever reads it."""

    def __init__(self, source: object, path: str) -> None:
        """Read an object.

        Args:
            source: the object.
            path: its place in config.json, for error messages.

        Raises:
            ModelError: it is no object.
        """
        if not isinstance(source, dict):
            raise bad_value(path, source, "an object")
        self._source: Json = source
        self._left = dict(source)
        self.path = path

    def take(self, key: str, default: Any = None) -> Any:
        """The key's value; `default` if it is missing or null."""
        value = self._left.pop(key, None)
        return default if value is None else value

    def first(self, *names: str, default: Any = None) -> Any:
        """The value of a key that has several names; those that are there must agree."""
        values = {name: self._left.pop(name) for name in names if self._left.get(name) is not None}
        name, value = next(iter(values.items()), ("", default))
        for other, again in values.items():
            if again != value:
                raise self.bad(other, again, f"what {name} says, {value!r}")
        return value

    def integer(self, key: str, allowed: Iterable[int], default: int | None = None) -> int:
        """A whole number among those allowed."""
        value = self.take(key, default)
        if not is_int(value) or value not in allowed:
            raise self.bad(key, value, f"one of {', '.join(map(str, allowed))}")
        return int(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise self.bad(key, value, "true or false")
        return value

    def choice(self, key: str, allowed: Iterable[str], default: str | None = None) -> str:
        """One of several words."""
        value = self.take(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise self.bad(key, value, f"one of {', '.join(map(repr, allowed))}")
        return value

    def texts(self, *names: str) -> tuple[str, ...]:
        """A list of texts under one of several names; empty if there is none."""
        value = self.first(*names, default=[])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.bad(names[0], value, "a list of texts")
        return tuple(value)

    def must_be(self, key: str, *allowed: object) -> None:
        """Refuse a value other than these; a key that is missing or null is fine."""
        value = self.take(key)
        if value is not None and not any(value == each and type(value) is type(each) for each in allowed):
            raise self.bad(key, value, " or ".join([*map(repr, allowed), "null"]))

    def skip(self, names: Iterable[str]) -> None:
        """Pass over keys that say nothing about what is stored."""
        for name in names:
            self._left.pop(name, None)

    def finish(self) -> None:
        """Refuse what is left.

        Raises:
            ModelError: names the first key that is not known.
        """
        for key, value in self._left.items():
            if value is not None:
                raise self.bad(key, value, "no such key: Naiad does not know what it means")

    def bad(self, key: str, value: object, expected: str) -> Exception:
        """Make the error for a key of this object."""
        return bad_value(f"{self.path}.{key}", value, expected)
