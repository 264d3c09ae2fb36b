"""Keys of the content parts of a chat's messages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from naiad.openai_server.api.bodies import ChatBody, parse_body
from naiad.openai_server.api.errors import APIError
from naiad.openai_server.api.messages import plain_messages


def with_part(**keys: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "x", **keys}]}]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (with_part(foo=1), r"messages\[0\].content\[0\].foo = 1 is not supported: expected type and text"),
        (with_part(image_url={"url": "http://x"}), r"content\[0\].image_url"),
    ],
)
def test_what_is_unknown_is_named(messages: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(APIError, match=words):
        plain_messages(messages)


@pytest.mark.parametrize("key", ["annotations", "logprobs", "id", "index", "cache_control"])
def test_what_has_no_effect_may_be_sent(key: str) -> None:
    assert plain_messages(with_part(**{key: [1]})) == [{"role": "user", "content": "x"}]


def test_unknown_keys_are_passed_over_and_counted() -> None:
    raw = msgspec.json.encode({"model": "m", "messages": with_part(foo=1)})
    body, passed_over = parse_body(raw, ChatBody, is_lenient=True)
    assert passed_over == ["messages.foo"]
    assert plain_messages(body.messages) == [{"role": "user", "content": "x"}]
    assert parse_body(raw, ChatBody, is_lenient=False)[1] == []
