"""The table of output tensors: a row for each tensor that a response may have, including internal ones.

`RESPONSE_TENSORS` are the outputs of `llm`, the detokenizer and the text level, in the order of their
configurations, because some clients read outputs by position. `TOKENIZER_TENSORS` and `VLLM_TENSORS` are the
outputs of those models.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from naiad.frontend.field import SAME, Kind

_BOOL, _STRING = Kind.BOOL, Kind.STRING
_INT32, _INT64, _UINT8, _UINT64 = Kind.INT32, Kind.INT64, Kind.UINT8, Kind.UINT64
_FP16, _FP32 = Kind.FP16, Kind.FP32
_LIST = (-1,)
_MATRIX = (-1, -1)


class Path(enum.Enum):
    """The path of a tensor from `llm`."""

    LLM_ONLY = "to direct clients of `llm` only"
    TO_DETOKENIZER = "to the detokenizer, which uses it"
    TO_CLIENT = "through the detokenizer to every client"
    FROM_DETOKENIZER = "made by the detokenizer"


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A row of the table of outputs.

    Attributes:
        name: its name at the text level, or else in `llm`.
        kind: the type of each value.
        dims: dimensions without the batch dimension.
        path: its path, which determines the models that have it.
        detokenizer: its name in the detokenizer; may be SAME.
        is_sent: whether it is ever sent.
        is_internal: whether it is meant for the next model only; clients that chain the models pass it on.
        note: when it is sent and what it holds.
    """

    name: str
    kind: Kind
    dims: tuple[int, ...] = (1,)
    path: Path = Path.TO_CLIENT
    detokenizer: str = SAME
    is_sent: bool = True
    is_internal: bool = False
    note: str = ""

    @property
    def detokenizer_name(self) -> str:
        """Its name in the detokenizer."""
        return self.name if self.detokenizer == SAME else self.detokenizer


def _internal(name: str, kind: Kind, dims: tuple[int, ...] = (1,), note: str = "") -> OutputTensor:
    return OutputTensor(name, kind, dims, Path.TO_DETOKENIZER, is_internal=True, note=note)


RESPONSE_TENSORS: tuple[OutputTensor, ...] = (
    OutputTensor("text_output", _STRING, _LIST, Path.FROM_DETOKENIZER, "OUTPUT",
                 note="one text; with beams one for each, best first. It has no batch dimension, as in "
                      "TensorRT-LLM's backend: `[0]` is the text"),
    OutputTensor("output_ids", _INT32, _MATRIX, Path.TO_DETOKENIZER, "TOKENS_BATCH",
                 note="new ids; unstreamed ids begin with the prompt unless it is excluded; with beams "
                      "[beams, longest], padded with −1; not with `text_chunk`"),
    OutputTensor("sequence_length", _INT32, _LIST, Path.TO_DETOKENIZER, "SEQUENCE_LENGTH",
                 note="length of each row of `output_ids`; not with `text_chunk`"),
    OutputTensor("cum_log_probs", _FP32, _LIST,
                 note="with `return_log_probs`: the sum over all new tokens so far; with beams the scores"),
    OutputTensor("output_log_probs", _FP32, _MATRIX,
                 note="with `return_log_probs`: [1, tokens], one for each new token; with beams "
                      "[beams, longest], padded with 0"),
    OutputTensor("context_logits", _FP32, _MATRIX,
                 note="with `return_context_logits`: [prompt tokens, vocabulary], on the first response of "
                      "each prompt and, in a stream, also on the last"),
    OutputTensor("generation_logits", _FP32, (-1, -1, -1),
                 note="with `return_generation_logits`: [1, tokens, vocabulary], if there are new tokens"),
    OutputTensor("batch_index", _INT32, note="if the request has more than one row"),
    OutputTensor("sequence_index", _INT32, note="if `num_return_sequences` > 1; not with beams"),
    OutputTensor("context_phase_params", _UINT8, _LIST, Path.LLM_ONLY, is_sent=False),
    OutputTensor("kv_cache_alloc_new_blocks", _INT32,
                 note="with `return_perf_metrics`, on every response: blocks newly allocated for the "
                      "sequence so far"),
    OutputTensor("kv_cache_reused_blocks", _INT32,
                 note="likewise: blocks reused from the prefix cache or a sibling"),
    OutputTensor("kv_cache_alloc_total_blocks", _INT32,
                 note="likewise: the same as `kv_cache_alloc_new_blocks`, as TensorRT-LLM's backend does not "
                      "count reused blocks either"),
    OutputTensor("arrival_time_ns", _INT64,
                 note="likewise: when the engine accepted the request, in nanoseconds of the machine's "
                      "monotonic clock"),
    OutputTensor("first_scheduled_time_ns", _INT64, note="likewise; 0: not yet"),
    OutputTensor("first_token_time_ns", _INT64, note="likewise; 0: not yet"),
    OutputTensor("last_token_time_ns", _INT64, note="likewise, of the newest token so far"),
    OutputTensor("acceptance_rate", _FP32,
                 note="on the last response of a request that sets `num_draft_tokens` > 0 or sends "
                      "`draft_input_ids`; with `return_perf_metrics` on every response; 0 without drafts"),
    OutputTensor("total_accepted_draft_tokens", _INT32, note="likewise"),
    OutputTensor("total_draft_tokens", _INT32, note="likewise"),
    OutputTensor("num_input_tokens", _INT32, note="with `return_num_input_tokens`"),
    OutputTensor("num_output_tokens", _INT32,
                 note="with `return_num_output_tokens`: new tokens of this response, of all beams"),
    OutputTensor("num_cached_tokens", _INT32,
                 note="with `return_num_cached_tokens`: prompt tokens from the prefix cache"),
    OutputTensor("finish_reason", _STRING, note="with `return_finish_reason`; empty until the last response"),
    OutputTensor("stop_reason", _STRING, note="with `finish_reason`; with beams both are of the best beam"),
    OutputTensor("top_log_prob_ids", _INT32, _MATRIX,
                 note="with `num_log_probs`: [tokens, `num_log_probs`], best first"),
    OutputTensor("top_log_probs", _FP32, _MATRIX, note="with `num_log_probs`"),
    _internal("sequence_id", _UINT64),
    _internal("window_ids", _INT32, _LIST, "the ids that the text depends on, the new ones last"),
    _internal("num_emitted_tokens", _INT32,
              note="on the last chunk; in earlier ones all ids but the new ones have been decoded"),
    _internal("max_chars", _INT32, note="on the last chunk; in earlier ones no text is cut off"),
    _internal("beam_max_chars", _INT32, _LIST),
    _internal("is_last", _BOOL, note="on the last chunk: true"),
    _internal("text_chunk", _INT64, _LIST,
              "with a `text_context`, on every chunk but the last, instead of the ids and the internal "
              "tensors above, if it is among the outputs that are asked for: the sequence, the number of new "
              "ids, and the ids that the text depends on, the new ones last"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenizerTensor:
    """An output of the `tokenizer` model.

    Attributes:
        llm: the input of `llm` to which the ensemble connects it; "" = none.
        is_sent: whether it is ever sent.
    """

    name: str
    kind: Kind
    dims: tuple[int, ...] = (1,)
    llm: str = ""
    is_sent: bool = True
    note: str = ""


def _never(name: str, kind: Kind, dims: tuple[int, ...] = (1,)) -> TokenizerTensor:
    return TokenizerTensor(name, kind, dims, is_sent=False)


TOKENIZER_TENSORS: tuple[TokenizerTensor, ...] = (
    TokenizerTensor("INPUT_ID", _INT32, _LIST, "input_ids"),
    TokenizerTensor("REQUEST_INPUT_LEN", _INT32, llm="input_lengths"),
    TokenizerTensor("DECODER_INPUT_ID", _INT32, _LIST,
                    note="one padding id, as in TensorRT-LLM's backend without DECODER_QUERY"),
    TokenizerTensor("REQUEST_DECODER_INPUT_LEN", _INT32, note="1"),
    TokenizerTensor("BAD_WORDS_IDS", _INT32, (2, -1), "bad_words_list", note="two sequences for each word"),
    TokenizerTensor("STOP_WORDS_IDS", _INT32, (2, -1), "stop_words_list"),
    TokenizerTensor("EMBEDDING_BIAS", _FP32, _LIST, "embedding_bias", note="the whole vocabulary, or empty"),
    TokenizerTensor("REQUEST_OUTPUT_LEN", _INT32, _LIST, "request_output_len"),
    TokenizerTensor("OUT_END_ID", _INT32, llm="end_id"),
    TokenizerTensor("OUT_PAD_ID", _INT32, llm="pad_id"),
    _never("OUT_PROMPT_TABLE_EXTRA_IDS", _UINT64, _LIST),
    _never("PIXEL_VALUES", _FP16, (-1, -1, -1, -1)),
    _never("ASPECT_RATIO_IDS", _INT64, _LIST),
    _never("ASPECT_RATIO_MASK", _INT64, _MATRIX),
    _never("CROSS_ATTENTION_MASK", _INT64, (-1, -1, -1)),
    _never("IMAGE_SIZES", _INT64, (-1, 2)),
    _never("IS_VIDEO_INPUT", _BOOL),
    _never("ATTENTION_MASK", _INT64, _LIST),
    _never("IMAGE_GRID_THW", _INT64, (3,)),
    _never("VISION_INPUT_ID", _INT32, _LIST),
    TokenizerTensor("text_context", _STRING, llm="text_context", note="internal"),
)  # fmt: skip

# The types and dimensions are the vLLM backend's, which has no batch dimension.
VLLM_TENSORS: tuple[OutputTensor, ...] = (
    OutputTensor("text_output", _STRING, _LIST, note="one text for each of `n` sequences"),
    OutputTensor("finish_reason", _STRING, _LIST,
                 note="with `return_finish_reason`; \"None\" until the last response"),
    OutputTensor("stop_reason", _STRING, _LIST, note="with `finish_reason`; empty: none"),
    OutputTensor("cumulative_logprob", _FP32, _LIST,
                 note="with `return_cumulative_logprob`: the sum over all new tokens so far"),
    OutputTensor("logprobs", _STRING, _LIST,
                 note="with `return_logprobs`: a JSON list with {id: {logprob, rank, decoded_token}} for "
                      "each new token of this response; \"null\" without the key `logprobs`"),
    OutputTensor("num_input_tokens", Kind.UINT32, note="with `return_num_input_tokens`"),
    OutputTensor("num_output_tokens", Kind.UINT32, _LIST,
                 note="with `return_num_output_tokens`: new tokens of this response"),
    OutputTensor("num_cached_tokens", _INT32, note="with `return_num_cached_tokens`"),
)  # fmt: skip


def llm_tensors() -> list[OutputTensor]:
    """Return the outputs of `llm`."""
    return [tensor for tensor in RESPONSE_TENSORS if tensor.path is not Path.FROM_DETOKENIZER]


def text_tensors() -> list[OutputTensor]:
    """Return the outputs of the ensemble, of `text` and, under its own names, of the detokenizer."""
    return [t for t in RESPONSE_TENSORS if t.path in (Path.TO_CLIENT, Path.FROM_DETOKENIZER)]


def detokenizer_inputs() -> list[OutputTensor]:
    """Return the detokenizer's inputs, by its own names: first those it uses, then those it passes on."""
    consumed = [t for t in RESPONSE_TENSORS if t.path is Path.TO_DETOKENIZER]
    return consumed + [t for t in RESPONSE_TENSORS if t.path is Path.TO_CLIENT]
