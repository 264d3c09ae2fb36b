"""What a failed call to a Triton server is to the client."""

from __future__ import annotations

import pytest

from naiad.errors import EngineAwayError, InternalError, InvalidRequestError, NaiadError
from naiad.openai_server.engines.remote.errors import error_of_call


@pytest.mark.parametrize(
    ("status", "details", "kind"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses", EngineAwayError),
        ("UNKNOWN", "Stream removed", EngineAwayError),
        ("INTERNAL", "Received RST_STREAM with error code 2", EngineAwayError),
        ("INVALID_ARGUMENT", "max_tokens = 0: expected a number ≥ 1", InvalidRequestError),
        ("INTERNAL", "NaN logits", InternalError),
    ],
)
def test_the_end_of_a_connection_is_told_from_an_error(
    status: str, details: str, kind: type[NaiadError]
) -> None:
    assert type(error_of_call(status, details, has_begun=False)) is kind


@pytest.mark.parametrize("status", ["UNAVAILABLE", "UNKNOWN", "INTERNAL"])
def test_what_has_begun_can_not_be_tried_again(status: str) -> None:
    assert type(error_of_call(status, "Stream removed", has_begun=True)) is InternalError
