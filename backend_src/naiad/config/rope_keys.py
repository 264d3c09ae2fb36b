"""Reads the keys of config.json that describe the rotary embedding."""

from __future__ import annotations

from naiad.config.attention import DEFAULT_ROPE_THETA, RopeConfig
from naiad.config.checkpoint_json import Json, bad_value, positive_float, positive_int

_ROPE_OBJECTS = ("rope_scaling", "rope_parameters")
_ROPE_TYPES = ("default", "linear", "llama3")


def read_rope(config: Json, max_positions: int) -> RopeConfig:
    """Read the rope of a checkpoint in which all layers have the same one.

    There are two formats, rope_theta + rope_scaling and rope_parameters; if a file has both, they must agree.

    Raises:
        ModelError: a key has a value that is not supported.
    """
    theta = _theta(config)
    ropes = {
        key: rope_object(config[key], key, theta, max_positions) for key in _ROPE_OBJECTS if config.get(key)
    }
    old, new = (ropes.get(key) for key in _ROPE_OBJECTS)
    if old is not None and new is not None and old != new:
        raise bad_value("rope_scaling", config["rope_scaling"], "what rope_parameters says, or null")
    return new or old or RopeConfig(theta=theta)


def rope_object(rope: object, key: str, theta: float, max_positions: int) -> RopeConfig:
    """Read one object that describes a rope.

    Args:
        rope: the object.
        key: its name in error messages.
        theta: the base of its frequencies.
        max_positions: the checkpoint's max_position_embeddings.

    Raises:
        ModelError: a key has a value that is not supported.
    """
    if not isinstance(rope, dict):
        raise bad_value(key, rope, "an object")
    if any(isinstance(value, dict) for value in rope.values()):
        raise bad_value(key, rope, "the same for every layer")
    rope_type = _rope_type(rope, key)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise bad_value(f"{key}.partial_rotary_factor", rope["partial_rotary_factor"], "1.0")
    if rope_type == "default":
        return RopeConfig(theta=theta)
    factor = positive_float(rope, "factor")
    if rope_type == "linear":
        return RopeConfig(rope_type="linear", theta=theta, factor=factor)
    low, high = positive_float(rope, "low_freq_factor"), positive_float(rope, "high_freq_factor")
    if high <= low:
        raise bad_value(f"{key}.high_freq_factor", high, f"more than low_freq_factor = {low}")
    return RopeConfig(
        rope_type="llama3",
        theta=theta,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=positive_int(
            rope, "original_max_position_embeddings", max_positions
        ),
    )


def agreed_theta(thetas: Json, default: float) -> float:
    """Return the base of the frequencies, which several keys may give.

    Args:
        thetas: the name of each key that exists → its value.
        default: the base if no key exists.

    Raises:
        ModelError: two keys disagree, or a value is not a positive number.
    """
    if not thetas:
        return default
    first, *others = thetas
    theta = positive_float(thetas, first)
    for key in others:
        if positive_float(thetas, key) != theta:
            raise bad_value(key, thetas[key], f"what {first} says, {theta!r}")
    return theta


def _theta(config: Json) -> float:
    thetas = {}
    for prefix, source in (("", config), *((f"{key}.", config.get(key)) for key in _ROPE_OBJECTS)):
        if isinstance(source, dict) and source.get("rope_theta") is not None:
            thetas[f"{prefix}rope_theta"] = source["rope_theta"]
    return agreed_theta(thetas, DEFAULT_ROPE_THETA)


def _rope_type(rope: Json, key: str) -> str:
    # `type` is the older name.
    names = {name: rope[name] for name in ("rope_type", "type") if name in rope}
    for name, value in names.items():
        if value not in _ROPE_TYPES:
            raise bad_value(f"{key}.{name}", value, "'default', 'linear' or 'llama3'")
    if len(set(names.values())) > 1:
        raise bad_value(f"{key}.type", names["type"], f"what {key}.rope_type says, {names['rope_type']!r}")
    return next(iter(names.values()), "default")
