"""Measures whether a tenant can tell from the time to the first token what another tenant has asked.

    python -m perf.server.prefix_oracle

Two tenants have keys of the OpenAI API. One asks a prompt; then a guesser asks that prompt and another of the
same length, in random order. Printed is how well the times tell the two apart: the area under the curve (AUC)
is 0.5 if they say nothing, and 1 or 0 if they always do. The first tenant guesses as well: if that does not
show, the measurement would not show a leak either. The command ends with 1 then, and if the other tenant's
area is more than 0.1 away from 0.5.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from perf.common.report import print_rows, write_report
from perf.server.serve_process import Served, naiad_serve

from naiad.cli.argument_types import at_least
from naiad.errors import InternalError

OWNER, OTHER = "owner", "other"
_MOST_FROM_HALF, _LEAST_OF_OWNER = 0.1, 0.9
_PATIENCE_S = 120.0
# More than a block of any size, so that the owner finds what it has asked.
_LEAST_TOKENS = 129
# Ids that are plain pieces of text for the default model.
_LEAST_ID, _MOST_ID = 1000, 20_000


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the results; return the exit code."""
    args = _parse(argv)
    with tempfile.TemporaryDirectory(prefix="naiad-perf-") as folder:
        keys = Path(folder) / "keys.json"
        keys.write_text(json.dumps({"keys": [_entry(OWNER), _entry(OTHER)]}))
        with naiad_serve(("--model", args.model, "--api-keys", str(keys))) as server:
            rows = asyncio.run(_measured(server, args))
    print_rows(rows)
    print("written:", write_report("prefix-oracle", vars(args), rows))
    is_shown = all(row["AUC"] >= _LEAST_OF_OWNER for row in rows if row["guesser"] == OWNER)
    is_kept = all(abs(row["AUC"] - 0.5) <= _MOST_FROM_HALF for row in rows if row["guesser"] == OTHER)
    return int(not (is_shown and is_kept))


async def _measured(server: Served, args: argparse.Namespace) -> list[dict[str, Any]]:
    draw = random.Random(args.seed)
    timeout = aiohttp.ClientTimeout(_PATIENCE_S)
    async with aiohttp.ClientSession(f"http://{server.openai}", timeout=timeout) as session:
        guesses = Guesses(session, await _model_of(session), draw)
        return [
            await guesses.row(guesser, num_tokens, args.guesses)
            for num_tokens, guesser in itertools.product(args.prompt_tokens, (OWNER, OTHER))
        ]


async def _model_of(session: aiohttp.ClientSession) -> str:
    async with session.get("/v1/models", headers=_headers(OWNER)) as answer:
        return str((await answer.json())["data"][0]["id"])


class Guesses:
    """Asks prompts that nobody has asked, and prompts that the owner has just asked."""

    def __init__(self, session: aiohttp.ClientSession, model: str, draw: random.Random) -> None:
        """Ask a model of the session's server for prompts that are drawn."""
        self._session = session
        self._model = model
        self._draw = draw

    async def row(self, guesser: str, num_tokens: int, num_guesses: int) -> dict[str, Any]:
        """Guess so often; how well the times tell right guesses from wrong ones.

        Raises:
            InternalError: a usage counts tokens of the other tenant's cache, or none of the guesser's own.
        """
        right_s: list[float] = []
        wrong_s: list[float] = []
        for _ in range(num_guesses):
            asked, not_asked = self._prompt(num_tokens), self._prompt(num_tokens)
            await self._ask(OWNER, asked)
            pair = [(asked, right_s), (not_asked, wrong_s)]
            self._draw.shuffle(pair)
            for prompt, times_s in pair:
                took_s, num_cached = await self._ask(guesser, prompt)
                times_s.append(took_s)
                if bool(num_cached) != (prompt is asked and guesser == OWNER):
                    raise InternalError(f"{guesser} was told of {num_cached} cached tokens")
        area = area_under_curve(right_s, wrong_s)
        margin = 1.96 * standard_error(area, num_guesses)
        return {
            "prompt tokens": num_tokens,
            "guesser": guesser,
            "guesses": num_guesses,
            "AUC": round(area, 3),
            "from": round(max(0.0, area - margin), 3),
            "to": round(min(1.0, area + margin), 3),
            "right ms": round(1e3 * statistics.median(right_s), 1),
            "wrong ms": round(1e3 * statistics.median(wrong_s), 1),
        }

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self._draw.randrange(_LEAST_ID, _MOST_ID) for _ in range(num_tokens)]

    async def _ask(self, tenant: str, prompt: list[int]) -> tuple[float, int]:
        """Ask for one token; the seconds until it came and the number of cached tokens that were told."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "ignore_eos": True}
        began_s = time.perf_counter()
        async with self._session.post("/v1/completions", json=body, headers=_headers(tenant)) as answer:
            said = await answer.json()
            took_s = time.perf_counter() - began_s
        if answer.status != 200:
            raise InternalError(f"a request failed: {said}")
        return took_s, said["usage"]["prompt_tokens_details"]["cached_tokens"]


def area_under_curve(right_s: Sequence[float], wrong_s: Sequence[float]) -> float:
    """The probability that a right guess is answered sooner than a wrong one; a tie counts half."""
    sooner = sum(
        (right < wrong) + (right == wrong) / 2 for right, wrong in itertools.product(right_s, wrong_s)
    )
    return sooner / (len(right_s) * len(wrong_s))


def standard_error(area: float, num_guesses: int) -> float:
    """The standard error of an area from so many right and as many wrong guesses.

    Source: Hanley and McNeil, "The Meaning and Use of the Area under a Receiver Operating Characteristic
    (ROC) Curve", Radiology 143, 1982.
    """
    two_right, two_wrong = area / (2 - area), 2 * area * area / (1 + area)
    more = (num_guesses - 1) * (two_right + two_wrong - 2 * area * area)
    return math.sqrt((area * (1 - area) + more) / (num_guesses * num_guesses))


def _entry(tenant: str) -> dict[str, str]:
    """The entry of a tenant's key in the file of keys; the key is the tenant's name."""
    digest = hashlib.sha256(tenant.encode()).hexdigest()
    return {"name": tenant, "sha256": digest, "tenant": tenant, "role": "user"}


def _headers(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {tenant}"}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="default", help="default, DIR or org/name[@revision]")
    add(
        "--prompt-tokens",
        type=at_least(_LEAST_TOKENS),
        nargs="+",
        default=[256, 512],
        metavar="N",
        help="lengths of prompts",
    )
    add(
        "--guesses",
        type=at_least(2),
        default=100,
        metavar="N",
        help="of each guesser, right and wrong ones each",
    )
    add("--seed", type=int, default=0, metavar="N", help="another seed draws other prompts")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
