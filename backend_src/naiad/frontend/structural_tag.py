"""Reads a structural tag in its first version, which has structures and triggers."""

from __future__ import annotations

from typing import Any

import msgspec

from naiad.frontend.field import FieldError, shown

_KEYS = ("type", "structures", "triggers")
_STRUCTURE_KEYS = ("begin", "schema", "end")


def structural_tag_of(field: str, value: Any) -> dict[str, Any]:
    """Read a structural tag.

    Args:
        field: the client's name for it.
        value: an object; or its JSON text.

    Returns:
        Its structures and triggers.

    Raises:
        FieldError: it is malformed, or of the later version, which has a `format`.
    """
    sent = _object(field, value)
    if "format" in sent:
        raise FieldError(f"{field}.format", " is not supported: expected structures and triggers")
    _check_keys(field, sent, _KEYS)
    if sent.get("type", "structural_tag") != "structural_tag":
        raise FieldError(f"{field}.type", f" = {shown(sent['type'])}: expected structural_tag")
    structures, triggers = sent.get("structures"), sent.get("triggers")
    if not isinstance(structures, list) or not structures:
        raise FieldError(f"{field}.structures", f" = {shown(structures)}: expected a list, not empty")
    if not isinstance(triggers, list) or not triggers:
        raise FieldError(f"{field}.triggers", f" = {shown(triggers)}: expected a list, not empty")
    for place, trigger in enumerate(triggers):
        _check_text(f"{field}.triggers[{place}]", trigger)
    for place, structure in enumerate(structures):
        _check_structure(f"{field}.structures[{place}]", structure)
    return {"structures": structures, "triggers": triggers}


def _object(field: str, value: Any) -> dict[str, Any]:
    sent = value
    if isinstance(value, str):
        try:
            sent = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
            sent = None
    if not isinstance(sent, dict):
        raise FieldError(field, f" = {shown(value)}: expected an object, or its JSON text")
    return sent


def _check_structure(field: str, structure: Any) -> None:
    if not isinstance(structure, dict):
        raise FieldError(field, f" = {shown(structure)}: expected an object of {', '.join(_STRUCTURE_KEYS)}")
    _check_keys(field, structure, _STRUCTURE_KEYS)
    _check_text(f"{field}.begin", structure.get("begin"))
    if not isinstance(structure.get("end"), str):
        raise FieldError(f"{field}.end", f" = {shown(structure.get('end'))}: expected a string")
    if not isinstance(structure.get("schema"), dict):
        raise FieldError(f"{field}.schema", f" = {shown(structure.get('schema'))}: expected a JSON schema")


def _check_keys(field: str, sent: dict[str, Any], known: tuple[str, ...]) -> None:
    unknown = next((key for key in sent if key not in known), None)
    if unknown is not None:
        raise FieldError(field, f": unknown key {unknown[:80]!r}: allowed are {', '.join(known)}")


def _check_text(field: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise FieldError(field, f" = {shown(value)}: expected a string, not empty")
