"""What goes into a parser, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass, field

from naiad.outputs import TokenLogProbs


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of a token, or text without one.

    Attributes:
        text: the characters that it completes.
        token_id: the token; None: characters that were left over at the end.
        log_probs: the token's log-probabilities, if they were asked for.
    """

    text: str
    token_id: int | None = None
    log_probs: TokenLogProbs | None = None


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is new of a tool call: first its name, then its arguments.

    Attributes:
        index: the number of the call in its output, from 0.
        call_id: the call's id, in its first delta alone.
        name: the tool's name, in the same delta.
        arguments: new text of the arguments, which are a JSON object.
    """

    index: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class ParsedDelta:
    """What a delta adds to each part of an output.

    Attributes:
        reasoning: new text of the reasoning.
        content: new text of the content.
        content_ids: the content's new tokens.
        content_log_probs: one for each of `content_ids`, if they were asked for.
        num_reasoning_tokens: new tokens of the reasoning, marks included.
        calls: what is new of tool calls.
    """

    reasoning: str = ""
    content: str = ""
    content_ids: list[int] = field(default_factory=list)
    content_log_probs: list[TokenLogProbs] = field(default_factory=list)
    num_reasoning_tokens: int = 0
    calls: list[CallDelta] = field(default_factory=list)

    def add_content_token(self, piece: Piece) -> None:
        """Count a piece's token to the content."""
        if piece.token_id is not None:
            self.content_ids.append(piece.token_id)
        if piece.log_probs is not None:
            self.content_log_probs.append(piece.log_probs)
