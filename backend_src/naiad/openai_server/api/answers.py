"""The bodies of answers and the chunks of streams as types, in the official clients' words."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from naiad.openai_server.api.errors import ErrorDetails


class NamedEvent(msgspec.Struct, kw_only=True):
    """An event of a stream whose events have names: the tag, which is also its `type`."""

    @property
    def event_name(self) -> str:
        """The event's name."""
        return str(self.__struct_config__.tag)


class CachedTokens(msgspec.Struct):
    """Details of a prompt's tokens."""

    cached_tokens: int = 0
    audio_tokens: int = 0


class PredictedTokens(msgspec.Struct):
    """Details of the new tokens; draft tokens are OpenAI's predicted tokens."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    reasoning_tokens: int = 0
    audio_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """Number of tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: PredictedTokens


class BestToken(msgspec.Struct):
    """A token that could have come, with its natural log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(BestToken):
    """A new token, with the best tokens at its position."""

    top_logprobs: list[BestToken]


class ChatLogProbs(msgspec.Struct):
    """Log-probabilities of a chat's new tokens."""

    content: list[ChatToken]
    refusal: None = None


class CompletionLogProbs(msgspec.Struct, kw_only=True):
    """Log-probabilities of a completion's tokens; None for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptToken(msgspec.Struct):
    """A token at a position of the prompt.

    Attributes:
        logprob: its natural log-probability.
        rank: its rank in the vocabulary, 1 = the most probable.
        decoded_token: its text.
    """

    logprob: float
    rank: int
    decoded_token: str


# For each position of a prompt the tokens that are reported, by id; None for the first one.
PromptLogProbs = list[dict[int, PromptToken] | None]


class CalledFunction(msgspec.Struct, kw_only=True):
    """The function that a call names, and its arguments as JSON."""

    name: str
    arguments: str


class MessageToolCall(msgspec.Struct, kw_only=True):
    """A call of a tool."""

    id: str
    type: str = "function"
    function: CalledFunction


class AddedFunction(msgspec.Struct, kw_only=True):
    """What a chunk adds to the function of a call."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class DeltaToolCall(msgspec.Struct, kw_only=True):
    """What a chunk adds to a call; the call's first chunk has its id, type and name."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: AddedFunction


class Message(msgspec.Struct, kw_only=True):
    """What the assistant said; older clients know its reasoning as `reasoning_content`."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[MessageToolCall] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class Delta(msgspec.Struct, kw_only=True):
    """What a chunk adds to a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[DeltaToolCall] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer to a chat."""

    index: int
    message: Message
    logprobs: ChatLogProbs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(msgspec.Struct, kw_only=True):
    """The body of an answer to a chat."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: None = None
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogProbs | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """A chunk's part of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """A chunk of a streamed chat."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogProbs | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One completion, or a chunk's part of one."""

    index: int
    text: str
    logprobs: CompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogProbs | UnsetType = UNSET


class CompletionAnswer(msgspec.Struct, kw_only=True):
    """The body of an answer to a completion, or a chunk of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None


class ModelCard(msgspec.Struct, kw_only=True):
    """A model of the list."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "naiad"
    root: str
    parent: None = None
    max_model_len: int
    capabilities: dict[str, bool]


class ModelList(msgspec.Struct, kw_only=True):
    """The body of `GET /v1/models`."""

    object: str = "list"
    data: list[ModelCard]


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """The body of an answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeAnswer(msgspec.Struct):
    """The body of an answer of `/detokenize`."""

    prompt: str


class ModelHealth(msgspec.Struct, kw_only=True):
    """What the last inference of a model has shown; times in seconds.

    Busy: the inference got no token, as the queue is full or long, but others get theirs.
    """

    status: Literal["ok", "busy", "failed"]
    seconds: float
    age_seconds: float
    error: str | None = None


class DeepHealth(msgspec.Struct, kw_only=True):
    """The body of `GET /health/deep`; `error` is there if a model has failed."""

    models: dict[str, ModelHealth]
    error: ErrorDetails | UnsetType = UNSET


_encoder = msgspec.json.Encoder()


def encode(answer: msgspec.Struct | dict[str, Any]) -> bytes:
    """Encode a body or a chunk as JSON."""
    return _encoder.encode(answer)
