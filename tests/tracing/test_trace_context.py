"""Which traces requests belong to, by W3C's Trace Context."""

from __future__ import annotations

import pytest

from naiad.tracing.trace_context import NO_TRACE, TraceContext, read_trace_context

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    "parent",
    [PARENT, PARENT.replace("-01", "-00"), f"01{PARENT[2:]}", f"01{PARENT[2:]}-more", f"01{PARENT[2:]}-"],
)
def test_valid_parents(parent: str) -> None:
    assert read_trace_context([parent], []) == TraceContext(parent)
    assert read_trace_context([f" {parent} "], []).headers == {"traceparent": parent}


@pytest.mark.parametrize(
    "parents",
    [
        [],
        [""],
        ["nonsense"],
        [PARENT, PARENT],
        [PARENT.upper()],
        [f"ff{PARENT[2:]}"],
        [f"{PARENT}-more"],
        [f"{PARENT}-"],
        [f"{PARENT}0"],
        [PARENT[:-1]],
        [PARENT.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32)],
        [PARENT.replace("00f067aa0ba902b7", "0" * 16)],
        [f"01{PARENT[2:]}-{'x' * 200}"],
        [f"01{PARENT[2:]}-a\nb"],
        [f"{PARENT}\n{PARENT}"],
    ],
)
def test_what_is_no_parent_counts_as_not_sent(parents: list[str]) -> None:
    assert read_trace_context(parents, ["a=1"]) is NO_TRACE
    assert read_trace_context(parents, ["a=1"]).headers == {}


@pytest.mark.parametrize(
    ("states", "state"),
    [
        ([], ""),
        (["a=1"], "a=1"),
        (["a=1, b=2"], "a=1,b=2"),
        (["a=1", "b=2"], "a=1,b=2"),
        (["a=1,,"], "a=1"),
        (["1tenant@system=x y"], "1tenant@system=x y"),
        (["a"], ""),
        (["A=1"], ""),
        (["a=1,a=2"], ""),
        (["a=b=c"], ""),
        (["a=é"], ""),
        (["a=1\nb=2"], ""),
        ([f"a={'x' * 257}"], ""),
        ([",".join(f"k{each}=1" for each in range(33))], ""),
        ([f"a={'x' * 250},b={'x' * 250},c=12345"], ""),
    ],
)
def test_states(states: list[str], state: str) -> None:
    assert read_trace_context([PARENT], states) == TraceContext(PARENT, state)
