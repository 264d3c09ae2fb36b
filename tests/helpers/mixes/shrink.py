"""Finds the shortest mix that still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from helpers.mixes.drawn import Asked, Kill, Mix, Settings

# A request keeps them: without them it is refused, or its tokens are anybody's guess.
_KEPT = ("input_ids", "text_input", "messages", "max_tokens", "seed")


def shrunk(mix: Mix, fails: Callable[[Mix], bool]) -> Mix:
    """Leave out all that a mix does not need to fail: kill, requests, rows, ways to end, fields and settings.

    Args:
        mix: a mix that fails.
        fails: whether a mix fails.
    """
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in _smaller(mix):
            if fails(smaller):
                mix, is_smaller = smaller, True
                break
    return mix


def _smaller(mix: Mix) -> Iterator[Mix]:
    """The mixes with one thing less, those with most less first."""
    requests = mix.requests
    yield from _smaller_kills(mix)
    for index in range(len(requests)):
        if len(requests) > 1:
            yield replace(mix, requests=requests[:index] + requests[index + 1 :])
    for index, asked in enumerate(requests):
        for smaller in _smaller_requests(asked):
            yield replace(mix, requests=(*requests[:index], smaller, *requests[index + 1 :]))
    plain = Settings()
    for name in (field.name for field in fields(Settings)):
        if getattr(mix.settings, name) != getattr(plain, name):
            yield replace(mix, settings=replace(mix.settings, **{name: getattr(plain, name)}))


def _smaller_kills(mix: Mix) -> Iterator[Mix]:
    if mix.kill is None:
        return
    yield replace(mix, kill=None)
    for name in (field.name for field in fields(Kill)):
        if getattr(mix.kill, name):
            yield replace(mix, kill=replace(mix.kill, **{name: 0}))


def _smaller_requests(asked: Asked) -> Iterator[Asked]:
    for row in asked.rows:
        if len(asked.rows) > 1:
            yield replace(asked, rows=tuple(each for each in asked.rows if each is not row))
    if asked.ending is not None:
        yield replace(asked, ending=None, ends_after=0)
    if asked.timeout_us:
        yield replace(asked, timeout_us=0)
    if asked.as_parameters:
        yield replace(asked, as_parameters=False)
    if asked.tick:
        yield replace(asked, tick=0)
    for name in asked.rows[0]:
        if name not in _KEPT:
            rows = tuple({key: value for key, value in row.items() if key != name} for row in asked.rows)
            yield replace(asked, rows=rows)


def as_source(mix: Mix) -> str:
    """A mix as Python, to be run again."""
    requests = "".join(f"        {asked!r},\n" for asked in mix.requests)
    return f"Mix(\n    {mix.settings!r},\n    (\n{requests}    ),\n    {mix.kill!r},\n)"
