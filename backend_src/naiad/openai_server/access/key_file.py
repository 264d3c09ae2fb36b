"""The file of `--api-keys`, and how a key becomes an entry of it.

The file is a JSON object with one field, `keys`, a list of entries:

    {"keys": [
      {"name": "alice", "sha256": "…", "tenant": "acme", "role": "user",
       "limits": {"requests_per_minute": 60, "tokens_per_minute": 100000,
                  "concurrent_requests": 8, "highest_priority": 0}}
    ]}

`sha256` is the SHA-256 of the key in hexadecimal digits, so the file holds no key. `role` (default: user) and
`limits` (default: none) may be left out, and so may each limit. Nobody but the file's owner may have the
right to write it. `naiad key NAME` makes a key and its entry.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from naiad.errors import ConfigError, StartupError
from naiad.small_file import read_private_file

OPTION = "--api-keys"
# The largest number is the lowest priority that the engine knows.
LOWEST_PRIORITY = 100
_MAX_COUNT = 2**53
_KEY_BYTES = 32
_SHOWN = 60
_COUNT = f"a whole number, 1 … {_MAX_COUNT}, or null for no limit"
_WORD = "1 to 64 letters, digits or characters of ._@+-"
# Field → what it may be, for errors.
_ALLOWED = {
    "keys": "a list of at least one entry",
    "name": _WORD,
    "sha256": "the SHA-256 of the key: 64 digits 0-9a-f",
    "tenant": _WORD,
    "role": "user or operator",
    "limits": "an object with limits",
    "requests_per_minute": _COUNT,
    "tokens_per_minute": _COUNT,
    "concurrent_requests": _COUNT,
    "highest_priority": f"a whole number, 0 (an ordinary request) … {LOWEST_PRIORITY} (the last)",
}
_PLACE = re.compile(r" - at `\$\.?(.*)`$")

Count = Annotated[int, Meta(ge=1, le=_MAX_COUNT)]
Word = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._@+-]{1,64}\Z")]
Role = Literal["user", "operator"]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a key may use; None: no limit.

    Attributes:
        requests_per_minute: requests; as many may come at once after a minute of silence.
        tokens_per_minute: prompt and new tokens together.
        concurrent_requests: requests under way at the same time.
        highest_priority: the smallest number that `priority` may be, which is also its default.
    """

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    concurrent_requests: Count | None = None
    highest_priority: Annotated[int, Meta(ge=0, le=LOWEST_PRIORITY)] = 0


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of the file.

    Attributes:
        name: names the key in messages.
        sha256: SHA-256 of the key, in hexadecimal digits.
        tenant: whose requests it sends; keys of one tenant share cached prefixes and one share of the engine.
        role: operators may see what concerns all tenants.
        limits: what it may use.
    """

    name: Word
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    tenant: Word
    role: Role = "user"
    limits: Limits = Limits()


def digest_of(key: str) -> str:
    """The SHA-256 of a key, as the file has it."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def new_key(name: str, tenant: str, role: Role) -> tuple[str, Key]:
    """Make a random key and its entry.

    Raises:
        ConfigError: the name or the tenant is not allowed.
    """
    key = secrets.token_urlsafe(_KEY_BYTES)
    sent = {"name": name, "sha256": digest_of(key), "tenant": tenant, "role": role}
    return key, _entry(sent, "naiad key")


def read_key_file(path: Path) -> tuple[Key, ...]:
    """Read the file.

    Raises:
        ConfigError: a field is not allowed; the message names the file, the entry, the field, its value and
            what is allowed.
        StartupError: the file cannot be read, others may write it, or it is not such a file.
    """
    file = f"{OPTION} {path}"
    sent = _json(path, file)
    if not isinstance(sent, dict) or not isinstance(sent.get("keys"), list) or not sent["keys"]:
        raise StartupError(f"{file}: expected a JSON object whose field keys is {_ALLOWED['keys']}")
    unknown = next((name for name in sent if name != "keys"), None)
    if unknown is not None:
        raise StartupError(
            f"{file}: {ascii(unknown)[1:-1][:_SHOWN]}: this field is not known: expected keys alone"
        )
    keys = []
    for number, entry in enumerate(sent["keys"], 1):
        name = entry.get("name") if isinstance(entry, dict) else None
        label = f" ({ascii(name)[1:-1][:_SHOWN]})" if isinstance(name, str) else ""
        keys.append(_entry(entry, f"{file}: entry {number}{label}"))
    for field in ("name", "sha256"):
        _check_differ(file, field, keys)
    return tuple(keys)


def write_key_file(path: Path, keys: Sequence[Key]) -> None:
    """Write such a file, for its owner's eyes alone, all of it or nothing."""
    part = path.with_name(f"{path.name}.part")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode({"keys": keys}))
    part.rename(path)


def _json(path: Path, file: str) -> Any:
    try:
        raw, mode = read_private_file(path)
    except OSError as error:
        raise StartupError(f"{file}: it can not be read: {error.strerror}") from None
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StartupError(
            f"{file}: mode = {mode:04o}: expected a file that its owner alone may write: chmod go-w {path}"
        )
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StartupError(f"{file}: it is not JSON: {error}") from None


def _entry(sent: Any, place: str) -> Key:
    try:
        return msgspec.convert(sent, Key)
    except msgspec.ValidationError as error:
        raise _error(str(error), sent, place) from None


def _error(message: str, sent: Any, place: str) -> StartupError:
    """Word an error of msgspec so that it says what is allowed."""
    found = _PLACE.search(message)
    path = found[1] if found else ""
    absent = re.search(r"(missing required|unknown) field `(.*?)`", message)
    if absent is not None:
        field = ".".join(filter(None, (path, ascii(absent[2])[1:-1][:_SHOWN])))
        if absent[1] == "unknown":
            known = (Limits if path else Key).__struct_fields__
            return StartupError(f"{place}: {field}: this field is not known: expected {', '.join(known)}")
        return StartupError(f"{place}: {field} is missing: expected {_ALLOWED[absent[2]]}")
    if not path:
        return StartupError(f"{place}: expected an object with the fields {', '.join(Key.__struct_fields__)}")
    value = sent
    for name in path.split("."):
        value = value[name] if isinstance(value, Mapping) else value
    if path == "sha256":
        # It may be the key itself.
        value = f"{str(value)[:4]}…"
    elif isinstance(value, str | list | dict):
        value = str(value)[:_SHOWN]
    return ConfigError(f"{place}: {path}", value, _ALLOWED[path.rpartition(".")[2]])


def _check_differ(file: str, field: str, keys: list[Key]) -> None:
    value, count = Counter(getattr(key, field) for key in keys).most_common(1)[0]
    if count > 1:
        names = ", ".join(key.name for key in keys if getattr(key, field) == value)
        shown = value if field == "name" else f"{value[:4]}…"
        raise StartupError(f"{file}: {count} entries ({names}) have {field} = {shown!r}: expected one")
