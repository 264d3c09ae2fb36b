"""Finds references in JSON schemas that never come to an end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any
from urllib.parse import unquote

_REF = "$ref"
_ALL, _UNIONS = "allOf", ("anyOf", "oneOf")
_MAX_SHOWN = 80
_MAX_INDEX_DIGITS = 9


def check_references(schema: Any, schemas: Iterable[Mapping[str, Any]]) -> None:
    """Refuse a `$ref` that leads back to itself for the same value, which no schema then describes.

    Recursion through the parts of a value is none of these, nor is that through one of several alternatives.

    Args:
        schema: parsed JSON.
        schemas: the schema and all schemas in it.

    Raises:
        ValueError: it has such a `$ref`; the message names it.
    """
    by_id = {id(each): each for each in schemas}
    graph = {
        key: ids
        for key, each in by_id.items()
        if (ids := [id(other) for other in _of_same_value(each, schema)])
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        # Each of the cycle is one that the next leads to.
        refs = (
            by_id[key][_REF]
            for target, key in pairwise(error.args[1])
            if id(_target(by_id[key], schema)) == target
        )
        raise ValueError(
            f"$ref = {next(refs)[:_MAX_SHOWN]!r} leads back to itself for the same value: expected "
            "references that come to an end"
        ) from None


def _of_same_value(schema: Mapping[str, Any], root: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the other schemas that a value has to obey if it obeys this one."""
    target = _target(schema, root)
    others = [] if target is None else [target]
    for keyword in (_ALL, *_UNIONS):
        listed = schema.get(keyword)
        if isinstance(listed, list) and (keyword == _ALL or len(listed) == 1):
            others += listed
    yield from (each for each in others if isinstance(each, Mapping))


def _target(schema: Mapping[str, Any], root: Any) -> Any:
    """What a schema's `$ref` points to, if it is a place in the same document; else None."""
    ref = schema.get(_REF)
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        return None
    place = root
    for part in unquote(ref).split("/")[1:]:
        place = _at(place, part.replace("~1", "/").replace("~0", "~"))
        # In a document of its own references mean other places.
        if isinstance(place, Mapping) and isinstance(place.get("$id"), str):
            return None
    return place


def _at(place: Any, key: str) -> Any:
    if isinstance(place, list):
        is_index = key.isdecimal() and len(key) <= _MAX_INDEX_DIGITS
        return place[int(key)] if is_index and int(key) < len(place) else None
    return place.get(key) if isinstance(place, Mapping) else None
