from __future__ import annotations

import msgspec
import pytest

from naiad.openai_server import reference_page
from naiad.openai_server.api.bodies import CompletionBody
from naiad.openai_server.reference_page import PAGE, with_tables


def test_the_page_has_the_tables_of_the_code() -> None:
    assert with_tables(PAGE.read_text()) == PAGE.read_text(), "run `make generated`"


def test_a_page_without_a_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected one table"):
        with_tables("Nothing.\n")


def test_a_field_of_which_nothing_is_said_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    more = msgspec.defstruct("More", [("surprise", int)], bases=(CompletionBody,), kw_only=True)
    monkeypatch.setattr(reference_page, "CompletionBody", more)
    with pytest.raises(KeyError, match="surprise"):
        with_tables(PAGE.read_text())
