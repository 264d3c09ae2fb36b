"""Writes the tables of fields in `docs/openai.md`: `python -m naiad.openai_server.reference_page`.

`make generated` runs it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import naiad
from naiad.frontend.compatibility_tables import key_note
from naiad.frontend.field import Frontend
from naiad.frontend.fields import fields_at
from naiad.openai_server.api.bodies import ACCEPTED, ANY, REFUSED, ChatBody, CompletionBody

PAGE = Path(naiad.__file__).parents[2] / "docs" / "openai.md"
# What the table of fields does not say.
_NOTES = {
    "model": "required; a name of `/v1/models`",
    "prompt": "required; a text, token ids, or at most 1,024 of either",
    "messages": "required; content is text, or parts of the type `text`",
    "stream": "the answer comes as server-sent events",
    "n": "1 … 16, the number of choices for each prompt",
    "temperature": "≥ 0; 0 = greedy; default 1",
    "top_p": "> 0, ≤ 1; default 1",
    "seed": "a whole number, of which 64 bits count; −1 = not sent",
    "logit_bias": "an object of at most 1,024 token ids, each with −1000 … 1000",
    "stop": "a text, or at most 64; matched on the answer's text",
    "min_tokens": "≥ 0; at most `max_tokens`; delays ids that end the text, but not stop strings",
    "bad_words": "at most 1,024 words of 256 bytes each, which are never generated",
    "ignore_eos": "the checkpoint's own ids do not end the text",
    "priority": "−100 … 100; smaller values are served first",
    "stream_options": "needs `stream`; `include_usage`, `continuous_usage_stats`; `include_obfuscation` has "
    "no effect",
    "max_tokens": "default 16 for completions, and the rest of the window for chats; "
    "0 only with `echo` or `prompt_logprobs`",
    "max_completion_tokens": "wins over `max_tokens`",
    "best_of": "as many as `n`: no further choice is drawn",
    "echo": "each choice begins with its prompt, and so do its `logprobs`",
    "logprobs": "completions: 0 … 20, the number of best tokens at each position; chats: true or false",
    "top_logprobs": "0 … 20; needs `logprobs`",
    "prompt_logprobs": "0 … 20, the number of best tokens at each position of the prompt, besides its own",
    "response_format": "`text`, `json_object`, or `json_schema` with a name and a schema; see "
    "[above](#structured-output)",
    "structured_outputs": "one of `json`, `json_object`, `regex`, `choice`, `grammar`, `structural_tag`; see "
    "[above](#structured-output)",
    "tools": "at most 128 functions, with 256 KiB; see [above](#tools)",
    "tool_choice": "`auto`, `none`, `required`, or a function by its name; default `auto`",
    "parallel_tool_calls": "default true; false: at most one call",
    "add_generation_prompt": "default true",
    "continue_final_message": "the answer continues the last message",
    "chat_template_kwargs": "values for the chat template",
    "include_reasoning": "default true; false: answers do not show what the model reasons",
    "skip_special_tokens": "default true",
    "spaces_between_special_tokens": "has no effect: special tokens are never merged",
    "add_special_tokens": "default: true for completions, false for chats",
    "truncate_prompt_tokens": "keeps the last N prompt tokens; −1: as many as leave room for the output",
    "truncation_side": "`left`, the default, or `right`: the end of the prompt at which tokens are dropped",
    "timeout_s": "> 0; the deadline, in seconds",
    "request_id": "at most 200 characters; the id of the answer and of the engine's request",
    "return_token_ids": "sends `token_ids` and `prompt_token_ids`",
    "return_tokens_as_token_ids": "log-probabilities name tokens `token_id:N`",
}


def with_tables(page: str) -> str:
    """Return the page with its tables regenerated.

    Raises:
        ValueError: the page lacks a table.
        KeyError: nothing is said of a field.
    """
    page = _with_table(page, "| field | | note |", _served_rows())
    page = _with_table(page, "| accepted field | values |", _value_rows(ACCEPTED))
    return _with_table(page, "| refused field | values that ask for nothing |", _value_rows(REFUSED))


def _with_table(page: str, header: str, rows: Iterable[str]) -> str:
    """Replace the rows below the header."""
    table = re.compile(rf"(^{re.escape(header)}\n\|[-|]+\n)(?:\|[^\n]*\n)*", re.MULTILINE)
    written, count = table.subn(lambda found: found[1] + "".join(f"{row}\n" for row in rows), page)
    if count != 1:
        raise ValueError(f"expected one table {header!r}, found {count}")
    return written


def _served_rows() -> list[str]:
    chat, completion = ChatBody.__struct_fields__, CompletionBody.__struct_fields__
    rows = []
    for key in dict.fromkeys((*completion, *chat)):
        where = "" if key in chat and key in completion else "chats" if key in chat else "completions"
        rows.append(f"| `{key}` | {where} | {_note(key)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return rows


def _note(key: str) -> str:
    return _NOTES[key] if key in _NOTES else key_note(fields_at(Frontend.OPENAI)[key], Frontend.OPENAI)


def _value_rows(fields: Mapping[str, tuple[Any, ...]]) -> list[str]:
    rows = []
    for key, values in sorted(fields.items()):
        shown = "any" if ANY in values else ", ".join(f"`{json.dumps(value)}`" for value in values)
        rows.append(f"| `{key}` | {shown} |".replace("|  |", "| |"))
    return rows


def main() -> None:
    """Write the page if its tables have changed."""
    page = PAGE.read_text(encoding="utf-8")
    if with_tables(page) != page:
        PAGE.write_text(with_tables(page), encoding="utf-8")
        print(f"wrote {PAGE.name}")


if __name__ == "__main__":
    main()
