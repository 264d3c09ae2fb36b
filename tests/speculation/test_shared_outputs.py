from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from naiad.speculation.shared_outputs import SharedOutputs
from naiad.speculation.suffix_automaton import ROOT, SuffixAutomaton


def holds(outputs: SharedOutputs, salt: str, token_ids: list[int]) -> bool:
    return any(occurs(part, token_ids) for part in outputs.parts(salt).values())


def occurs(part: SuffixAutomaton, token_ids: list[int]) -> bool:
    state = ROOT
    for token_id in token_ids:
        state = part.follow(state, token_id)
        if state == ROOT:
            return False
    return True


@settings(deadline=None)
@given(
    st.integers(0, 40), st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 3), max_size=15)))
)
def test_the_bound_holds_and_the_newest_is_there(max_tokens: int, added: list[tuple[str, list[int]]]) -> None:
    outputs = SharedOutputs(max_tokens)
    for salt, token_ids in added:
        outputs.add(salt, token_ids)
        held = [part for name in "abc" for part in outputs.parts(name).values()]
        assert outputs.num_tokens == sum(part.num_tokens for part in held) <= max_tokens
        assert all(part.num_tokens > 0 for part in held)
        num_kept = min(len(token_ids), max_tokens // 4 - 1)
        if num_kept > 0:
            assert holds(outputs, salt, token_ids[-num_kept:])
    assert outputs._tenants.keys() == {number for parts in outputs._parts.values() for number in parts}
    assert all(outputs._parts.values())


def test_tenants_find_their_own_only() -> None:
    outputs = SharedOutputs(100)
    outputs.add("a", [1, 2])
    outputs.add("b", [3, 4])
    assert holds(outputs, "a", [1, 2])
    assert not holds(outputs, "a", [3])
    assert not outputs.parts("")


def test_the_oldest_outputs_go_first() -> None:
    outputs = SharedOutputs(16)
    for first in range(0, 30, 3):
        outputs.add("", [first, first + 1, first + 2])
    assert [holds(outputs, "", [first]) for first in range(0, 30, 3)] == [False] * 6 + [True] * 4


def test_a_part_with_a_newer_output_outlives_one_that_began_later() -> None:
    outputs = SharedOutputs(24)
    for salt, token_ids in (("a", [1, 2]), ("b", [3] * 5), ("a", [4, 5]), ("c", [6] * 5), ("d", [7] * 5)):
        outputs.add(salt, token_ids)
    assert outputs.num_tokens == 24
    outputs.add("e", [8])
    assert not outputs.parts("b")
    assert holds(outputs, "a", [1, 2])


def test_short_outputs_share_a_part() -> None:
    outputs = SharedOutputs(80)
    for number in range(100):
        outputs.add("", [number])
        assert len(outputs.parts("")) <= 4


def test_a_tenant_that_says_nothing_loses_its_room() -> None:
    outputs = SharedOutputs(16)
    outputs.add("quiet", [1, 2, 3])
    for token_id in range(10, 15):
        outputs.add("busy", [token_id] * 3)
    assert not outputs.parts("quiet")


def test_a_tenant_that_alone_is_there_keeps_more_than_half() -> None:
    outputs = SharedOutputs(400)
    for number in range(500):
        outputs.add("", [number % 7] * (number % 40 + 1))
        assert number < 30 or outputs.num_tokens > 200


def test_of_a_long_output_the_end_is_held() -> None:
    outputs = SharedOutputs(40)
    outputs.add("", list(range(30)))
    assert holds(outputs, "", list(range(21, 30)))
    assert not holds(outputs, "", [20])


def test_matches_do_not_run_across_outputs() -> None:
    outputs = SharedOutputs(100)
    outputs.add("", [1, 2])
    outputs.add("", [3, 4])
    assert not holds(outputs, "", [2, 3])


def test_no_room_holds_nothing() -> None:
    outputs = SharedOutputs(0)
    outputs.add("", [1])
    assert not outputs.parts("")
    assert outputs.num_tokens == 0
