"""Numbers on the command line."""

from __future__ import annotations

import argparse

import pytest

from naiad.cli.argument_types import at_least, num_bytes, port_number

LARGEST = 2**31 - 1


@pytest.mark.parametrize("text", [str(LARGEST + 1), "9" * 23, "9" * 5000])
def test_a_count_that_is_too_large_is_refused(text: str) -> None:
    assert at_least(1)(str(LARGEST)) == LARGEST
    with pytest.raises(argparse.ArgumentTypeError, match=f"expected a whole number, 1 … {LARGEST}$"):
        at_least(1)(text)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "²", ""])
def test_a_count_that_is_too_small_or_none_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"expected a whole number ≥ 1$"):
        at_least(1)(text)


def test_a_size_may_be_larger_than_a_count() -> None:
    assert num_bytes("0") == 0
    assert num_bytes(str(2**63 - 1)) == 2**63 - 1
    with pytest.raises(argparse.ArgumentTypeError, match=f"expected a whole number, 0 … {2**63 - 1}$"):
        num_bytes(str(2**63))


@pytest.mark.parametrize("text", ["65536", "9" * 23, "-1", "http"])
def test_a_port_that_is_none_is_refused(text: str) -> None:
    assert [port_number("0"), port_number("65535")] == [0, 65535]
    with pytest.raises(argparse.ArgumentTypeError, match=r"expected a port, 0 … 65535$"):
        port_number(text)
