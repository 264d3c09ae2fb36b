"""Text: encoding and decoding, chat templates, stop strings."""

from naiad.tokenization.chat_template import PLAIN_CHAT, ChatOptions
from naiad.tokenization.nesting import MAX_LEVELS, is_too_deep
from naiad.tokenization.text_decoder import (
    TextDecoder,
    context_ids,
    decode,
    decode_after,
    decode_chunk,
)
from naiad.tokenization.text_stream import TextChunk, TextStream
from naiad.tokenization.token_table import TokenTable
from naiad.tokenization.tokenizer import Tokenizer
from naiad.tokenization.word_list import pack_word_list, unpack_word_list

__all__ = [
    "MAX_LEVELS",
    "PLAIN_CHAT",
    "ChatOptions",
    "TextChunk",
    "TextDecoder",
    "TextStream",
    "TokenTable",
    "Tokenizer",
    "context_ids",
    "decode",
    "decode_after",
    "decode_chunk",
    "is_too_deep",
    "pack_word_list",
    "unpack_word_list",
]
