"""Fields of bodies that a server refuses besides those that no server has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from naiad.frontend.field import shown
from naiad.openai_server.api.errors import APIError


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row of a table of refused fields.

    Attributes:
        name: the field's name in the bodies of chats and completions.
        allowed: values that ask for nothing, besides null.
        reason: why others are refused, as the end of a sentence.
    """

    name: str
    allowed: tuple[Any, ...]
    reason: str

    def asks(self, value: Any) -> bool:
        """Whether a value asks for what is refused. True and 1 are different values."""
        return value is not None and not any(
            type(value) is type(each) and value == each for each in self.allowed
        )


_NO_IDS = "the answers of a remote server have no token ids"


def remote_refusals(*, skips_special_tokens: bool = True) -> tuple[Refusal, ...]:
    """The fields that are refused in front of a remote server.

    Args:
        skips_special_tokens: what the remote model does, which a request cannot change.
    """
    return (
        Refusal("logprobs", (False,), _NO_IDS),
        Refusal("top_logprobs", (), _NO_IDS),
        Refusal("prompt_logprobs", (), "a remote server does not report them"),
        Refusal("return_token_ids", (False,), _NO_IDS),
        Refusal("return_tokens_as_token_ids", (False,), _NO_IDS),
        Refusal(
            "skip_special_tokens",
            (skips_special_tokens,),
            "the remote model's configuration decides it for all requests",
        ),
    )


def refuse(body: msgspec.Struct, refusals: Iterable[Refusal], names: Mapping[str, str]) -> None:
    """Refuse a body that asks for what is not served.

    Args:
        body: the body.
        refusals: the table.
        names: field → its name in errors, where it is another one.

    Raises:
        APIError: the body has a refused value; the message names the field, the value and the reason.
    """
    for refusal in refusals:
        value = getattr(body, refusal.name, None)
        if refusal.asks(value):
            name = names.get(refusal.name, refusal.name)
            expected = " or ".join(["no value", *map(repr, refusal.allowed)])
            message = f"{name} = {shown(value)} is not supported: expected {expected}, as {refusal.reason}."
            raise APIError(400, message, param=name, code="unsupported_value")
