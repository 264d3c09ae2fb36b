"""The table of all fields: a row for each field and list that a request may have, served or not.

To add a scalar field that sets an attribute of `SamplingParams`, add one row here: the frontends then read
it, and `make generated` adds it to `config.pbtxt` and `docs/compatibility.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from naiad.frontend.field import (
    ABSENT,
    INT32_MAX,
    SAME,
    UINT64_MAX,
    Arrival,
    Field,
    Frontend,
    Kind,
)
from naiad.sequence import MAX_LENGTH_PENALTY

_BOOL, _STRING = Kind.BOOL, Kind.STRING
_INT32, _INT64, _UINT8, _UINT64 = Kind.INT32, Kind.INT64, Kind.UINT8, Kind.UINT64
_FP16, _FP32 = Kind.FP16, Kind.FP32
_KEYS = Frontend.SAMPLING_PARAMETERS
_LIST = (-1,)
_PACKED = (2, -1)
_MATRIX = (-1, -1)
_PIXELS = (-1, -1, -1, -1)
_MAX_WORD_BYTES = 256
_MAX_BAD_WORDS = 1024
_MAX_BIASED_IDS = 1024
_MAX_BIAS = 1000.0
_MAX_SEQUENCES = 16
_MAX_GRAMMAR_BYTES = 512 * 1024
# Beam search does not draw tokens: the values that neither draw nor filter.
_DRAWS_NOTHING = (0.0, 1.0)

_PROMPT = (
    Field("text_input", _STRING, sets="prompt", llm=ABSENT, tokenizer="QUERY", vllm=SAME,
          note="either this or `messages`; special tokens in the text are recognised",
          notes={Frontend.TOKENIZER: ""}),
    Field("messages", _STRING, sets="prompt", llm=ABSENT, tokenizer=SAME, vllm=SAME,
          note="JSON list of {role, content, name}, name optional; special tokens in them are plain text"),
    Field("input_ids", _INT32, _LIST, sets="prompt", required=True, text=ABSENT),
    Field("input_lengths", _INT32, sets="prompt", required=True, text=ABSENT, arrival=Arrival.TENSOR),
    Field("text_context", _STRING, sets="text", text=ABSENT, arrival=Arrival.TENSOR,
          note="internal, written by `tokenizer`"),
    Field("sampling_parameters", _STRING, text=ABSENT, llm=ABSENT, vllm=SAME, arrival=Arrival.TENSOR,
          note="a JSON object, see below; values may be strings"),
)  # fmt: skip

_LENGTH = (
    Field("max_tokens", _INT32, minimum=1, maximum=INT32_MAX, sets="params.max_tokens", required=True,
          llm="request_output_len", tokenizer="REQUEST_OUTPUT_LEN", key=SAME, openai=SAME, key_default=16,
          note="clamped to the space left in the window",
          notes={Frontend.TOKENIZER: "", _KEYS: "null: the space left in the window"}),
    Field("min_tokens", _INT32, minimum=0, maximum=INT32_MAX, sets="params.min_tokens", key=SAME, openai=SAME,
          note="at most `max_tokens`; delays ids that end the text, but not stop strings: see Length"),
    Field("min_length", _INT32, minimum=0, maximum=INT32_MAX, alias_of="min_tokens", vllm=SAME),
    Field("ignore_eos", _BOOL, sets="params.stop_token_ids", key=SAME, openai=SAME,
          note="neither `end_id` nor the checkpoint's own ids end the text"),
    Field("end_id", _INT32, minimum=-1, maximum=INT32_MAX, sets="params.stop_token_ids", tokenizer="END_ID",
          note="−1 or an id beyond the vocabulary = none; the checkpoint's own ids also end the text",
          notes={Frontend.TOKENIZER: ""}),
    Field("pad_id", _INT32, minimum=-1, maximum=INT32_MAX, tokenizer="PAD_ID",
          note="has no effect: nothing is padded", notes={Frontend.TOKENIZER: ""}),
    Field("stop_words", _STRING, _LIST, sets="text", max_items=64, max_item_size=_MAX_WORD_BYTES,
          llm=ABSENT, tokenizer="STOP_WORDS_DICT", key="stop", openai="stop", arrival=Arrival.BOTH,
          note='matched on text; "" is padding', notes={Frontend.TOKENIZER: '"" is padding'}),
    Field("stop_words_list", _INT32, _PACKED, sets="params.stop_sequences", max_items=64, max_item_size=256,
          with_beams=(), text=ABSENT,
          note="packed: row 0 ids, row 1 offsets; with `text_context` its strings are used instead"),
    Field("stop_token_ids", _INT32, _LIST, sets="params.stop_token_ids", max_items=64, key=SAME, openai=SAME),
    Field("include_stop_str_in_output", _BOOL, sets="text", key=SAME, openai=SAME,
          note="the text ends after the stop string, not before it",
          notes={Frontend.LLM: "with `text_context`; a packed stop word's ids stay in the output anyway"}),
)  # fmt: skip

_SAMPLING = (
    Field("temperature", _FP32, minimum=0, sets="params.temperature", with_beams=_DRAWS_NOTHING, key=SAME,
          openai=SAME,
          key_default=1.0, note="0 = greedy; default 1, which alone does not sample: see Greedy or not"),
    Field("top_k", _INT32, minimum=0, maximum=INT32_MAX, off=0, sets="params.top_k", with_beams=(0, 1),
          filters=True, llm="runtime_top_k", key=SAME, openai=SAME, key_off=(-1,), note="1 = greedy"),
    Field("top_p", _FP32, maximum=1, off=0.0, sets="params.top_p", with_beams=(1.0,), llm="runtime_top_p",
          filters=True, key=SAME, openai=SAME, key_default=1.0, key_above=0),
    Field("top_p_decay", _FP32, minimum=1e-6, maximum=1, off=1.0, sets="params.top_p_decay",
          with_beams=(1.0,), llm="runtime_top_p_decay",
          note="multiplies top-p after each token; needs `top_p`",
          notes={Frontend.LLM: "multiplies top-p after each token; needs `runtime_top_p`"}),
    Field("top_p_min", _FP32, minimum=0, maximum=1, sets="params.top_p_decay", llm="runtime_top_p_min",
          note="lower bound of a decaying top-p; default 0.000001"),
    Field("top_p_reset_ids", _INT32, minimum=-1, maximum=INT32_MAX, sets="params.top_p_decay",
          llm="runtime_top_p_reset_ids", note="after this token a decaying top-p is reset; −1 = none"),
    Field("min_p", _FP32, minimum=0, maximum=1, off=0.0, sets="params.min_p", with_beams=(0.0,), key=SAME,
          openai=SAME,
          filters=True, note="keeps the tokens with at least this fraction of the best token's probability"),
    Field("top_n_sigma", _FP32, above=0, sets="params.top_n_sigma", with_beams=(), key=SAME,
          openai=SAME, filters=True,
          note="keeps the tokens whose logit is within this many standard deviations of the largest"),
    Field("seed", _UINT64, minimum=0, maximum=UINT64_MAX, sets="params.seed", key=SAME,
          openai=SAME, key_off=(-1,),
          note="random if not sent; no effect with beams"),
    Field("random_seed", _UINT64, minimum=0, maximum=UINT64_MAX, alias_of="seed",
          note="the name in TensorRT-LLM's backend until April 2025"),
    Field("repetition_penalty", _FP32, minimum=0.01, maximum=100, off=1.0, sets="params.repetition_penalty",
          key=SAME, openai=SAME),
    Field("presence_penalty", _FP32, minimum=-100, maximum=100, off=0.0, sets="params.presence_penalty",
          key=SAME, openai=SAME),
    Field("frequency_penalty", _FP32, minimum=-100, maximum=100, off=0.0, sets="params.frequency_penalty",
          key=SAME, openai=SAME),
    Field("num_draft_tokens", _INT32, minimum=0, maximum=INT32_MAX, sets="params.num_draft_tokens",
          vllm=SAME, key=SAME, openai=SAME,
          note="maximum number of draft tokens in a step; 0 = none; default and upper limit: the engine's "
               "`num_speculative_tokens`"),
    Field("draft_input_ids", _INT32, _LIST, sets="draft_token_ids", max_items=4096, with_beams=(),
          text=ABSENT, note="a guess at the beginning of the output; used as long as the output agrees"),
)  # fmt: skip

_WORDS_AND_BIASES = (
    Field("bad_words", _STRING, _LIST, sets="params.bad_words", max_items=_MAX_BAD_WORDS,
          max_item_size=_MAX_WORD_BYTES, llm=ABSENT, tokenizer="BAD_WORDS_DICT", key=SAME, openai=SAME,
          arrival=Arrival.BOTH, note='"" is padding; see below', notes={Frontend.TOKENIZER: '"" is padding'}),
    # Twice as many as at the text level, where each word is banned with and without a space before it.
    Field("bad_words_list", _INT32, _PACKED, sets="params.bad_words", max_items=2 * _MAX_BAD_WORDS,
          max_item_size=512, text=ABSENT, note="packed as `stop_words_list`"),
    Field("embedding_bias_words", _STRING, _LIST, sets="params.logit_bias", max_items=_MAX_BIASED_IDS,
          max_item_size=_MAX_WORD_BYTES, llm=ABSENT, tokenizer="EMBEDDING_BIAS_WORDS",
          note='"" is padding; see below', notes={Frontend.TOKENIZER: '"" is padding'}),
    Field("embedding_bias_weights", _FP32, _LIST, minimum=-_MAX_BIAS, maximum=_MAX_BIAS,
          sets="params.logit_bias", llm=ABSENT, tokenizer="EMBEDDING_BIAS_WEIGHTS", note="one for each word"),
    Field("embedding_bias", _FP32, _LIST, minimum=-_MAX_BIAS, maximum=_MAX_BIAS, sets="params.logit_bias",
          max_items=_MAX_BIASED_IDS, text=ABSENT,
          note="no values, or one for each id of the vocabulary; zeros are not counted"),
    Field("logit_bias_ids", _INT32, _LIST, sets="params.logit_bias", max_items=_MAX_BIASED_IDS, vllm=SAME,
          key="logit_bias", openai="logit_bias", note="an id that occurs twice gets the sum",
          notes={_KEYS: "with `logit_bias_values`: −1000 … 1000"}),
    Field("logit_bias_values", _FP32, _LIST, minimum=-_MAX_BIAS, maximum=_MAX_BIAS,
          sets="params.logit_bias", vllm=SAME, note="one for each id"),
    Field("allowed_token_ids", _INT32, _LIST, sets="params.allowed_token_ids", key=SAME, openai=SAME,
          note="only these tokens can be generated; empty = all"),
)  # fmt: skip

_GRAMMAR = (
    Field("guided_decoding_guide_type", _STRING, sets="grammar", max_item_size=32,
          note="json (no guide), json_schema, regex or ebnf_grammar; see [structured output]"
               "(structured_output.md)"),
    Field("guided_decoding_guide", _STRING, sets="grammar", max_item_size=_MAX_GRAMMAR_BYTES,
          note="the schema as JSON, the expression, or the rules in GBNF"),
)  # fmt: skip

_SEQUENCES = (
    Field("num_return_sequences", _INT32, minimum=1, maximum=_MAX_SEQUENCES, sets="num_return_sequences",
          per_request=True, key="n", openai="n",
          note="number of sequences for each prompt, each with its own random numbers; with beams, the "
               "number of beams that are sent (default: all)", notes={_KEYS: "1 with `stream`"}),
    Field("beam_width", _INT32, minimum=1, maximum=_MAX_SEQUENCES, off=1, sets="beam", per_request=True,
          note="> 1 = beam search"),
    Field("length_penalty", _FP32, minimum=-MAX_LENGTH_PENALTY, maximum=MAX_LENGTH_PENALTY,
          sets="beam.length_penalty",
          without_beams=(0.0, 1.0), llm="len_penalty", note="default 0"),
    Field("early_stopping", _BOOL, sets="beam.stops_early", without_beams=(False,), note="default true"),
    Field("beam_search_diversity_rate", _FP32, minimum=0, maximum=100.0, sets="beam.diversity_rate",
          without_beams=(0.0,), note="default 0: see Beams"),
)  # fmt: skip

_SERVICE = (
    Field("stream", _BOOL, sets="streaming", per_request=True, with_beams=(), llm="streaming", vllm=SAME),
    # Sent by TensorRT-LLM's client.
    Field("Streaming", _BOOL, repeats="stream", text=ABSENT, llm=ABSENT, arrival=Arrival.PARAMETER),
    # Sent by benchmarks. The model's own parameter decides what a stream holds.
    Field("accumulate_tokens", _BOOL, text=ABSENT, llm=ABSENT, arrival=Arrival.PARAMETER),
    Field("stop", _BOOL, sets="stop", per_request=True, text_model_only=True,
          note="cancels every live request of the same id, which must not be empty",
          notes={Frontend.TEXT: "cancels every live request of the same id; no other field is needed"}),
    Field("exclude_input_in_output", _BOOL, sets="exclude_input", per_request=True, vllm=SAME,
          note="default: the parameter of the same name of `llm`, false",
          notes={Frontend.VLLM: "default false; with `stream` the prompt is never sent; false is refused"}),
    Field("priority", _INT32, minimum=-100, maximum=100, sets="params.priority", vllm=SAME, key=SAME,
          openai=SAME,
          note="smaller values are served first"),
    Field("cache_salt", _STRING, sets="cache_salt", max_item_size=256, vllm=SAME,
          openai=SAME,
          note="only prompts with the same salt share cached blocks"),
    Field("retention_token_range_starts", _INT32, _LIST, minimum=0, maximum=INT32_MAX, sets="retention",
          text=ABSENT, max_items=64, note="each range's first prompt token; see [scheduling](scheduling.md)"),
    Field("retention_token_range_ends", _INT32, _LIST, maximum=INT32_MAX, sets="retention", text=ABSENT,
          note="the token after each range's last; −1 = the prompt's end"),
    Field("retention_token_range_priorities", _INT32, _LIST, minimum=0, maximum=100, sets="retention",
          text=ABSENT, note="the default is 35"),
    Field("retention_token_range_durations_ms", _INT32, _LIST, minimum=0, maximum=INT32_MAX, sets="retention",
          text=ABSENT, note="−1 or not sent: until the block is evicted"),
    Field("retention_decode_priority", _INT32, minimum=0, maximum=100, sets="retention", text=ABSENT,
          arrival=Arrival.TENSOR, note="for blocks that hold output"),
    Field("retention_decode_duration_ms", _INT32, minimum=0, maximum=INT32_MAX, sets="retention", text=ABSENT,
          arrival=Arrival.TENSOR, note="−1: until the block is evicted"),
)  # fmt: skip

_REQUESTED_OUTPUTS = (
    Field("return_finish_reason", _BOOL, sets="outputs.finish_reason", per_request=True, vllm=SAME),
    Field("return_num_input_tokens", _BOOL, sets="outputs.num_input_tokens", per_request=True, vllm=SAME),
    Field("return_num_output_tokens", _BOOL, sets="outputs.num_output_tokens", per_request=True, vllm=SAME),
    Field("return_num_cached_tokens", _BOOL, sets="outputs.num_cached_tokens", per_request=True, vllm=SAME),
    Field("return_log_probs", _BOOL, sets="outputs.log_probs", per_request=True,
          note="sends `output_log_probs` and `cum_log_probs`"),
    Field("num_log_probs", _INT32, minimum=0, maximum=20, sets="outputs.num_log_probs", per_request=True,
          with_beams=(), key="logprobs",
          note="number of best tokens at each position; sends `top_log_prob_ids` and `top_log_probs`"),
    Field("num_prompt_log_probs", _INT32, minimum=0, maximum=20, sets="outputs.num_prompt_log_probs",
          per_request=True, with_beams=(), text=ABSENT, llm=ABSENT, openai="prompt_logprobs"),
    Field("return_context_logits", _BOOL, sets="outputs.context_logits", per_request=True, with_beams=(),
          note="sends `context_logits`; at most 256 MiB of logits for each request"),
    Field("return_generation_logits", _BOOL, sets="outputs.generation_logits", per_request=True,
          with_beams=(), note="sends `generation_logits`; at most 256 MiB of logits for each request"),
    Field("return_perf_metrics", _BOOL, sets="outputs.perf_metrics", per_request=True,
          note="sends timings, blocks and drafts with every response"),
    Field("return_cumulative_logprob", _BOOL, text=ABSENT, llm=ABSENT, vllm=SAME),
    Field("return_logprobs", _BOOL, text=ABSENT, llm=ABSENT, vllm=SAME),
)  # fmt: skip


def _unserved(name: str, kind: Kind, dims: tuple[int, ...] = (1,), **places: Any) -> Field:
    return Field(name, kind, dims, served=False, **places)


# Declared because clients may know them, but refused if a request uses them.
_NOT_SERVED = (
    _unserved("decoder_text_input", _STRING, llm=ABSENT, tokenizer="DECODER_QUERY"),
    # The tokenizer sends a single id for every prompt, and clients pass it on.
    _unserved("decoder_input_ids", _INT32, _LIST, text=ABSENT, single_is_off=True,
              note="a single id is accepted because `preprocessing` sends one for every prompt"),
    _unserved("decoder_input_lengths", _INT32, text=ABSENT, off_values=(0, 1)),
    _unserved("encoder_input_features", _FP32, _MATRIX, text=ABSENT),
    _unserved("encoder_output_lengths", _INT32, text=ABSENT),
    _unserved("draft_logits", _FP32, _MATRIX, text=ABSENT),
    _unserved("draft_acceptance_threshold", _FP32, text=ABSENT),
    _unserved("lookahead_window_size", _INT32, text=ABSENT),
    _unserved("lookahead_ngram_size", _INT32, text=ABSENT),
    _unserved("lookahead_verification_set_size", _INT32, text=ABSENT),
    _unserved("prompt_embedding_table", _FP16, _MATRIX),
    _unserved("prompt_table_extra_id", _UINT64, llm=ABSENT, tokenizer="PROMPT_TABLE_EXTRA_ID"),
    _unserved("prompt_table_extra_ids", _UINT64, _LIST, text=ABSENT),
    _unserved("prompt_vocab_size", _INT32, off_values=(0,)),
    _unserved("cross_attention_mask", _BOOL, _MATRIX, text=ABSENT),
    _unserved("mrope_rotary_cos_sin", _FP32, _LIST, text=ABSENT),
    _unserved("mrope_position_deltas", _INT64, text=ABSENT),
    _unserved("skip_cross_attn_blocks", _BOOL, text=ABSENT),
    _unserved("lora_task_id", _UINT64, off_values=(0,)),
    _unserved("lora_weights", _FP16, _MATRIX),
    _unserved("lora_config", _INT32, (-1, 3)),
    _unserved("context_phase_params", _UINT8, _LIST, text=ABSENT),
    _unserved("image_input", _FP16, (-1, 3, -1, -1), llm=ABSENT, text_model_only=True),
    _unserved("image_bytes_input", _UINT8, _PIXELS, llm=ABSENT, text_model_only=True),
    _unserved("image_url_input", _STRING, llm=ABSENT, text_model_only=True),
    _unserved("video_bytes_input", _UINT8, _PIXELS, llm=ABSENT, text_model_only=True),
    _unserved("use_draft_logits", _BOOL, llm=ABSENT, text_model_only=True, off_values=(False,)),
    _unserved("IMAGE_BYTES", _UINT8, _PIXELS, text=ABSENT, llm=ABSENT, tokenizer=SAME),
    _unserved("IMAGE_URL", _STRING, text=ABSENT, llm=ABSENT, tokenizer=SAME),
    _unserved("VIDEO_BYTES", _UINT8, _PIXELS, text=ABSENT, llm=ABSENT, tokenizer=SAME),
    _unserved("IMAGES", _STRING, _LIST, text=ABSENT, llm=ABSENT, tokenizer=SAME),
    _unserved("image", _STRING, _LIST, text=ABSENT, llm=ABSENT, vllm=SAME),
    _unserved("embedding_request", _STRING, text=ABSENT, llm=ABSENT, vllm=SAME),
)  # fmt: skip


def _key(name: str, *off: Any) -> Field:
    return Field(name, _STRING, served=False, text=ABSENT, llm=ABSENT, key=SAME, key_off=off)


# Keys of the vLLM backend's JSON that no other frontend has, or that only this frontend refuses. Null always
# means off.
_VLLM_KEYS = (
    Field("best_of", _INT32, text=ABSENT, llm=ABSENT, key=SAME, notes={_KEYS: "the value of `n`"}),
    _key("prompt_logprobs"),
    _key("detokenize", True),
    _key("skip_special_tokens", True),
    _key("spaces_between_special_tokens", True),
    _key("truncate_prompt_tokens"),
    Field(
        "structured_outputs",
        _STRING,
        sets="grammar",
        max_item_size=_MAX_GRAMMAR_BYTES,
        text=ABSENT,
        llm=ABSENT,
        key=SAME,
        notes={
            _KEYS: "an object with one of json, json_object, regex, choice, grammar and structural_tag: see "
            "[structured output](structured_output.md)"
        },
    ),
    Field(
        "guided_decoding",
        _STRING,
        sets="grammar",
        max_item_size=_MAX_GRAMMAR_BYTES,
        text=ABSENT,
        llm=ABSENT,
        key=SAME,
        notes={_KEYS: "vLLM's earlier name for `structured_outputs`"},
    ),
    _key("lora_name", ""),
    _key("use_beam_search", False),
    _key("length_penalty", 1.0),
    _key("early_stopping", False),
    _key("logits_processors", []),
    _key("extra_args", {}),
    _key("flat_logprobs", False),
)

FIELDS: tuple[Field, ...] = (
    *_PROMPT,
    *_LENGTH,
    *_SAMPLING,
    *_WORDS_AND_BIASES,
    *_GRAMMAR,
    *_SEQUENCES,
    *_SERVICE,
    *_REQUESTED_OUTPUTS,
    *_NOT_SERVED,
    *_VLLM_KEYS,
)

# If two rows share a name, the first one counts: `length_penalty` is a field, and also a refused key.
FIELD: Mapping[str, Field] = {field.name: field for field in reversed(FIELDS)}


def fields_at(frontend: Frontend) -> dict[str, Field]:
    """Return the fields that a frontend has, by its names for them."""
    return {name: field for field in FIELDS if (name := field.name_at(frontend))}


def known_parameters(frontend: Frontend) -> dict[str, Field]:
    """Return the parameters that a frontend reads, by name, without those that it declares but refuses.

    A parameter reaches every step of the ensemble under its text-level name. The vLLM backend's model also
    accepts the keys of `sampling_parameters` as parameters.
    """
    if frontend in (Frontend.VLLM, Frontend.SAMPLING_PARAMETERS):
        known = {
            field.name: field for field in FIELDS if field.served and field.vllm and field.comes_as_parameter
        }
        return known | fields_at(Frontend.SAMPLING_PARAMETERS)
    return {
        field.name: field
        for field in FIELDS
        if field.served and field.comes_as_parameter
        if field.text or field.llm or field.arrival is Arrival.PARAMETER
    }
