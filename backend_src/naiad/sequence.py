"""One request's row in the engine: its parameters and its progress. No tensors."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

# Retention priority of blocks for which the client requests none; the same as TensorRT-LLM's.
DEFAULT_KV_PRIORITY = 35
# A greater exponent, or a smaller one than its negative, could overflow a beam's score.
MAX_LENGTH_PENALTY = 10
# Stands in a step's row for an id that the previous step samples and that is not on the host yet.
UNKNOWN_TOKEN = -1


class FinishReason(str, enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    ERROR = "error"


class SequenceStatus(enum.Enum):
    """A sequence's state. A preempted sequence is WAITING again and holds no blocks."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class TopPDecay(msgspec.Struct, frozen=True):
    """A decaying top-p (Lee et al., arXiv 2206.04624; TensorRT-LLM's rule).

    The first token is sampled with the request's top-p. After each token top-p is multiplied by
    `factor`, down to `minimum`; after the token `reset_id` it is the request's again.

    Attributes:
        factor: in (0, 1).
        minimum: in [0, 1].
        reset_id: −1 = none.
    """

    factor: float
    minimum: float
    reset_id: int = -1


class GrammarKind(str, enum.Enum):
    """In which language a grammar is written."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    EBNF = "ebnf"
    LARK = "lark"
    STRUCTURAL_TAG = "structural_tag"


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the text of an output has to look like, as the client wrote it.

    Attributes:
        kind: the language of `source`.
        source: JSON_SCHEMA: a schema as JSON text; JSON_OBJECT: empty, any JSON object; REGEX: a regular
            expression that the whole text matches; CHOICE: a JSON list of texts, of which it is one;
            EBNF: rules in GBNF, with `root`; LARK: rules in llguidance's dialect of Lark, with `start`,
            which may contain JSON schemas (`%json`); STRUCTURAL_TAG: a JSON object of `structures`, each with
            begin, schema and end, and `triggers`: text in which a trigger begins one of the structures.
        begins_after: the grammar holds for what follows the first occurrence of this text in the output, and
            what comes before is free, such as a model's reasoning; empty: it holds from the first token on.
        opened_by: with `begins_after`: only an output that begins with this text has something before the
            grammar, which holds for all of any other; empty: every output has.
        field: the client's name for the field, with which error messages begin.
    """

    kind: GrammarKind
    source: str = ""
    begins_after: str = ""
    opened_by: str = ""
    field: str = "grammar"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one sequence is sampled and when it ends. Already validated.

    Attributes:
        max_tokens: new tokens at most, ≥ 1.
        temperature: 0 = greedy.
        top_k: keep the k best tokens; 0 = off.
        top_p: keep the smallest set of best tokens with this mass; 1 = off.
        top_p_decay: how top_p shrinks from token to token; None = it does not.
        seed: key of the row's noise, 0 … 2**64 - 1. The caller that builds the params draws one if
            the client sent none, so that a recomputed row draws the same noise.
        repetition_penalty: divides (multiplies, if negative) the logit of every token of
            prompt and output; 1 = off.
        presence_penalty: subtracted once from every token of the output; 0 = off.
        frequency_penalty: subtracted per occurrence in the output; 0 = off.
        min_tokens: no end of text before this many new tokens.
        stop_token_ids: ids that end the sequence (end_id and the checkpoint's eos list
            unless ignore_eos); the id itself is not part of the output.
        stop_sequences: token-id sequences that end it (direct users' packed stop words);
            their ids stay in the output.
        min_p: keep the tokens with at least this share of the best one's probability; 0 = off.
        top_n_sigma: keep the tokens whose logit lies within this many standard deviations of the
            greatest; 0 = off.
        bad_words: token-id sequences that are never completed.
        logit_bias: (id, value) pairs, added to the logits; ids in [0, vocab_size), none twice.
        allowed_token_ids: only these are possible, each in [0, vocab_size); empty = all.
        grammar: what the output's text has to look like; None = anything.
        num_log_probs: −1 = none; else the log-probability of each new token is reported, and those of
            this many most probable tokens at its position.
        num_prompt_log_probs: −1 = none; else the log-probability of each prompt token but the first is
            reported, and those of this many most probable tokens at its position.
        returns_context_logits: the output contains the logits of every prompt position.
        returns_generation_logits: the output contains the logits from which each new token was drawn.
        priority: smaller is served first.
        num_candidates: > 0: a beam; requests have 0, the engine sets it. Nothing is drawn; the search chooses
            among this many best tokens.
        num_draft_tokens: maximum number of draft tokens in a step; −1 = the engine's maximum.
        returns_perf_metrics: every output contains times and block counts.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    top_p_decay: TopPDecay | None = None
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    grammar: GrammarSpec | None = None
    num_log_probs: int = -1
    num_prompt_log_probs: int = -1
    returns_context_logits: bool = False
    returns_generation_logits: bool = False
    priority: int = 0
    num_candidates: int = 0
    num_draft_tokens: int = -1
    returns_perf_metrics: bool = False

    @property
    def describes_prompt(self) -> bool:
        """Whether the output needs the logits of the prompt's positions, for themselves or to reduce them."""
        return self.returns_context_logits or self.num_prompt_log_probs >= 0


class TextContext(msgspec.Struct, frozen=True, kw_only=True):
    """Sent with a request whose tokens a detokenizer turns into text.

    Attributes:
        stop_strings: raw stop strings, matched on text.
        skip_special_tokens: special tokens are left out of the text.
        prompt_tail_ids: the last ids of the prompt, with which decoding starts.
        num_prompt_chars: characters of the prompt's decoded text (for echoed prompts).
        includes_stop_string: the text includes the stop string that ended it.
        received_s: when the tokenizer model got the request, on the monotonic clock; 0 = it did not.
    """

    stop_strings: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    prompt_tail_ids: tuple[int, ...] = ()
    num_prompt_chars: int = 0
    includes_stop_string: bool = False
    received_s: float = 0.0


class BeamParams(msgspec.Struct, frozen=True, kw_only=True):
    """A beam search; its width is the number of the request's sequences.

    Attributes:
        length_penalty: exponent of the length by which a text's score is divided, at most
            `MAX_LENGTH_PENALTY` either way.
        stops_early: the search ends as soon as enough texts have ended.
        diversity_rate: makes the children of worse beams more likely to be chosen; 0 = off.
    """

    length_penalty: float = 1.0
    stops_early: bool = False
    diversity_rate: float = 0.0


class KVRetention(msgspec.Struct, frozen=True, kw_only=True):
    """The priority with which a sequence's blocks stay in the prefix cache.

    Attributes:
        ranges: ranges of prompt tokens as (start, end, priority, duration_s): `end` is exclusive, the
            priority is in [0, 100], and infinite seconds mean until the block is evicted.
        decode_priority, decode_duration_s: the same for blocks with output.
    """

    ranges: tuple[tuple[int, int, int, float], ...] = ()
    decode_priority: int = DEFAULT_KV_PRIORITY
    decode_duration_s: float = math.inf

    def of_tokens(self, start: int, end: int, num_prompt_tokens: int) -> tuple[int, float] | None:
        """The greatest priority of the tokens [start, end) and its seconds; None: none is requested."""
        asked = [
            (priority, duration_s)
            for first, stop, priority, duration_s in self.ranges
            if max(first, start) < min(stop, end, num_prompt_tokens)
        ]
        if end > num_prompt_tokens and self.decode_priority != DEFAULT_KV_PRIORITY:
            asked.append((self.decode_priority, self.decode_duration_s))
        return max(asked, default=None)


class PrefixIdentity(msgspec.Struct, frozen=True):
    """What must be equal, besides the tokens, for two prefixes to share KV.

    Attributes:
        salt: the request's `cache_salt`; requests with different salts share nothing.
    """

    salt: str = ""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One row as it is handed to the engine.

    Attributes:
        sequence_id: unique during the life of the stub that sends it.
        prompt_token_ids: each in [0, vocab_size), at least one.
        text: present when a detokenizer follows.
        timeout_s: seconds until the deadline, counted from receipt; None = none.
        cache_salt: KV blocks are shared within one salt only.
        tenant: who gets a fair share of the engine, whatever its requests' salts are; None: the salt is
            the tenant.
        sibling_ids: further sequences from the same prompt, each with its own id and noise; the
            prompt is computed once.
        beam: the sequences are the results of one search, the best first; each has one output.
        draft_token_ids: the client's guess at how the output begins.
        retention: priority of its blocks in the prefix cache, once they are free.
    """

    sequence_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    text: TextContext | None = None
    timeout_s: float | None = None
    cache_salt: str = ""
    tenant: str | None = None
    sibling_ids: tuple[int, ...] = ()
    beam: BeamParams | None = None
    draft_token_ids: tuple[int, ...] = ()
    retention: KVRetention | None = None

    @property
    def sequence_ids(self) -> tuple[int, ...]:
        """The ids of all its sequences; each of them gets exactly one last output."""
        return self.sequence_id, *self.sibling_ids


class SequenceGrammar(Protocol):
    """A compiled grammar, such as `naiad.grammar.CompiledGrammar`; it stays compiled while it is held."""

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The ids that end a text."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request inside the engine.

    `token_ids` are the known tokens: prompt, then output. KV of the first
    `num_computed_tokens` of them is in the cache; the scheduler lets that number catch up.

    Attributes:
        tenant: the tenant that it belongs to; tenants share the engine fairly.
        prefix_identity: which sequences may share KV with this one.
        rank: the scheduler's order, smaller first; ties go to the smaller id.
        donor: a sequence with the same prompt, whose blocks this one shares when it starts.
        offered_token_ids: the client's guess at how the output begins.
        retention: priority of its blocks in the prefix cache, once they are free.
        grammar: what its output has to look like, compiled; None = anything.
        overlaps: its next row may be launched before the host knows its last id.
        num_draft_tokens, num_accepted_tokens: totals over all steps so far.
        num_cached_tokens: prompt tokens from the prefix cache; with a donor, the donor's number.
        num_reused_blocks: full blocks that were already cached when it was first admitted.
        next_start, next_end: the scheduler's projection, as if every scheduled step were complete: its
            next row computes the tokens from `next_start` on, and `next_end` tokens are known.
        last_projected_end: the length at which the projection stops adding a token to `next_end`.
        num_sent_tokens, num_sent_blocks: how many of its tokens and of its table's blocks the model
            runner has received and still holds unchanged.
        first_scheduled_s, first_token_s, last_token_s: on the clock of `arrival_s`; 0 = not yet.
        block_tables: the blocks that hold its KV, one table for each KV group; −1 in place of a block
            that no window sees any more. Only the KV cache manager writes them.
        block_table: the first group's block table.
    """

    sequence_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    arrival_s: float
    deadline_s: float | None = None
    tenant: str = ""
    prefix_identity: PrefixIdentity = field(default_factory=PrefixIdentity)
    rank: float = 0.0
    donor: Sequence | None = None
    offered_token_ids: tuple[int, ...] = ()
    retention: KVRetention | None = None
    grammar: SequenceGrammar | None = None
    overlaps: bool = False
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_reused_blocks: int = 0
    num_preemptions: int = 0
    next_start: int = 0
    next_end: int = 0
    last_projected_end: int = 0
    num_sent_tokens: int = 0
    num_sent_blocks: int = 0
    first_scheduled_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    status: SequenceStatus = SequenceStatus.WAITING
    block_table: list[int] = field(default_factory=list)
    block_tables: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        """Make the first group's table the first of the tables."""
        self.block_tables = [self.block_table]

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether its prefix may come from the cache; not if the logits of every position are needed."""
        return not self.params.describes_prompt

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the sampled ids."""
        return self.token_ids[self.num_prompt_tokens :]
