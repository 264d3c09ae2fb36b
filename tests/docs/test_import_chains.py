"""How many files of a room stand on each other: who reads the top one may have to read all of them."""

from __future__ import annotations

from functools import cache

import grimp
import pytest

LONGEST_CHAINS = {"naiad.triton_server": 8}


@pytest.mark.parametrize("room", LONGEST_CHAINS)
def test_longest_chain_of_imports_inside_a_room_is_short(room: str) -> None:
    graph = grimp.build_graph("naiad", cache_dir=None)

    @cache
    def chain(module: str) -> tuple[str, ...]:
        below = [
            each for each in graph.find_modules_directly_imported_by(module) if each.startswith(f"{room}.")
        ]
        return (module, *max((chain(each) for each in below), key=len, default=()))

    longest = max((chain(each) for each in graph.find_descendants(room)), key=len)
    assert len(longest) <= LONGEST_CHAINS[room], " → ".join(longest)
