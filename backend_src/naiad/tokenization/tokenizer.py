"""`Tokenizer`: encodes texts and chats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from naiad.errors import InvalidRequestError
from naiad.freed_memory import give_back_memory
from naiad.tokenization.chat_template import PLAIN_CHAT, ChatOptions, ChatTemplate, parse_messages
from naiad.tokenization.checkpoint_tokenizer import NAMED_TOKENS, CheckpointTokenizer, encode_text
from naiad.tokenization.plain_content import PlainContent
from naiad.tokenization.text_decoder import TextDecoder, context_ids
from naiad.tokenization.token_table import TokenTable


class Tokenizer:
    """Turns text and messages into ids, and describes a prompt's text for the detokenizer."""

    def __init__(self, checkpoint: CheckpointTokenizer) -> None:
        """Build the tokenizer of a checkpoint, which `checkpoint` holds.

        Raises:
            ModelError: the tokenizer's kind is not supported, or the files contradict each other.
        """
        self._tokenizer = checkpoint.tokenizer
        self.table = TokenTable.from_checkpoint(checkpoint)
        self.bos_id = checkpoint.named_token_id("bos_token")
        self.eos_id = checkpoint.named_token_id("eos_token")
        pad_id = checkpoint.named_token_id("pad_token")
        self.pad_id = self.eos_id if pad_id is None else pad_id
        self._bos_token = checkpoint.named_token("bos_token")
        self._plain_content = PlainContent(checkpoint)
        self._chat_template_source = checkpoint.chat_template
        self._chat_template = ChatTemplate(
            checkpoint.chat_template, {name: checkpoint.named_token(name) for name in NAMED_TOKENS}
        )

    @classmethod
    def from_directory(cls, model_dir: str | Path) -> Tokenizer:
        """Read the tokenizer files of `model_dir`.

        Raises:
            ModelError: a file is missing or damaged, or the tokenizer's kind is not supported.
        """
        loaded = cls(CheckpointTokenizer.load(model_dir))
        # What was read takes as much as what stays, in each process that has a tokenizer.
        give_back_memory()
        return loaded

    @property
    def chat_template(self) -> str | None:
        """The source of the checkpoint's chat template; None without one."""
        return self._chat_template_source

    def token_id(self, token: str) -> int | None:
        """The id of a token; None if the vocabulary does not have it."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a special one, which may produce no text."""
        return token_id in self.table.special_ids

    @property
    def takes_tools(self) -> bool:
        """Whether the checkpoint's chat template shows tools."""
        return self._chat_template.takes_tools

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Encode a text; special tokens written in it are recognised.

        Args:
            text: any text.
            add_special_tokens: add the begin-of-text (and end-of-text) token as the checkpoint does; a
                text that already begins with it does not get a second one.

        Raises:
            InvalidRequestError: the text is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequestError("text: holds half a surrogate pair") from None
        ids = encode_text(self._tokenizer, text, add_special_tokens=add_special_tokens)
        return self._begun_once(text, ids) if add_special_tokens else ids

    def _begun_once(self, text: str, ids: list[int]) -> list[int]:
        """The ids of a text without the token that was added to the one with which it begins itself."""
        begins_itself = self._bos_token is not None and text.startswith(self._bos_token)
        return ids[1:] if begins_itself and ids[:2] == [self.bos_id, self.bos_id] else ids

    def encode_bad_word(self, word: str) -> list[list[int]]:
        """Return the id sequences to ban for a word: at the beginning of a text, and after a space.

        Most vocabularies have a separate token for a word with its space. Leading spaces of the word
        itself make no difference.

        Args:
            word: not empty.

        Raises:
            InvalidRequestError: the word is not valid Unicode.
        """
        bare = word.lstrip(" ") or word
        encoded = [tuple(self.encode(text, add_special_tokens=False)) for text in (bare, " " + bare)]
        return [list(ids) for ids in dict.fromkeys(encoded)]

    def render_chat(
        self, messages_json: str, options: ChatOptions = PLAIN_CHAT, *, add_special_tokens: bool = False
    ) -> list[int]:
        """Encode a chat, by default up to the point where the assistant begins to speak.

        Nothing that messages and tools say becomes a special token.

        Args:
            messages_json: JSON list of {role, content}, with `name` where the speaker has one.
            options: how it is rendered.
            add_special_tokens: add those of a text, as `encode` does, to those of the template.

        Raises:
            InvalidRequestError: the messages are malformed, or the checkpoint's template is
                missing, refuses them or exceeds its limits.
        """
        messages = parse_messages(messages_json, options.speaks_tools)
        marked = [
            {
                key: value if key == "role" else self._plain_content.mark_all(value, "messages")
                for key, value in message.items()
            }
            for message in messages
        ]
        tools = tuple(self._plain_content.mark_all(tool, "tools") for tool in options.tools)
        options = replace(options, tools=tools)
        rendered = self._chat_template.render(marked, options)
        ids = self._plain_content.encode(rendered, add_special_tokens=add_special_tokens)
        return self._begun_once(rendered, ids) if add_special_tokens else ids

    def prompt_tail(self, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> list[int]:
        """Return the prompt's last ids, at most three, on which the text after it depends."""
        return context_ids(self.table, prompt_ids, skip_special_tokens)

    def num_prompt_chars(self, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> int:
        """Count the complete characters of the prompt's text."""
        return len(TextDecoder(self.table, skip_special_tokens).push_all(prompt_ids))
