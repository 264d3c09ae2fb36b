"""Generates the `config.pbtxt` of each shipped model from the tables of fields and outputs."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from naiad.config import EngineConfig
from naiad.frontend.field import Field, Frontend, Kind
from naiad.frontend.fields import fields_at
from naiad.frontend.output_tensors import (
    TOKENIZER_TENSORS,
    VLLM_TENSORS,
    Path,
    detokenizer_inputs,
    llm_tensors,
    text_tensors,
)

DEFAULT_MAX_BATCH_SIZE = 8
# Inputs that are not optional in TensorRT-LLM's configurations either.
_REQUIRED_TENSORS = frozenset({"input_lengths", "request_output_len"})
_LINE_WIDTH = 110

# The order of the inputs in the configurations; inputs not named here follow in the table's order.
_ORDERS: Mapping[Frontend, str] = {
    Frontend.ENSEMBLE: """
        text_input messages max_tokens decoder_text_input bad_words stop_words embedding_bias_words
        embedding_bias_weights end_id pad_id prompt_table_extra_id guided_decoding_guide_type
        guided_decoding_guide num_return_sequences top_k min_tokens beam_width prompt_vocab_size
        top_p temperature length_penalty early_stopping repetition_penalty presence_penalty
        frequency_penalty seed lora_task_id exclude_input_in_output return_log_probs
        return_context_logits return_generation_logits return_perf_metrics stream
        return_num_input_tokens return_num_output_tokens prompt_embedding_table lora_weights
        lora_config priority top_p_decay top_p_min top_p_reset_ids beam_search_diversity_rate min_p
        min_length random_seed ignore_eos stop_token_ids allowed_token_ids logit_bias_ids
        logit_bias_values include_stop_str_in_output num_log_probs num_draft_tokens cache_salt
        return_finish_reason return_num_cached_tokens
    """,
    Frontend.TEXT: """
        image_input image_bytes_input image_url_input video_bytes_input use_draft_logits stop
    """,
    Frontend.TOKENIZER: """
        QUERY messages DECODER_QUERY IMAGE_BYTES IMAGE_URL VIDEO_BYTES IMAGES REQUEST_OUTPUT_LEN
        BAD_WORDS_DICT STOP_WORDS_DICT EMBEDDING_BIAS_WORDS EMBEDDING_BIAS_WEIGHTS END_ID PAD_ID
        PROMPT_TABLE_EXTRA_ID
    """,
    Frontend.LLM: """
        input_ids input_lengths request_output_len decoder_input_ids decoder_input_lengths
        encoder_input_features encoder_output_lengths end_id pad_id num_return_sequences beam_width
        temperature runtime_top_k runtime_top_p runtime_top_p_min runtime_top_p_decay
        runtime_top_p_reset_ids len_penalty early_stopping repetition_penalty min_tokens
        beam_search_diversity_rate presence_penalty frequency_penalty seed stop_words_list
        bad_words_list embedding_bias return_log_probs return_context_logits
        return_generation_logits return_perf_metrics exclude_input_in_output stop streaming
        return_num_input_tokens return_num_output_tokens draft_input_ids draft_logits
        draft_acceptance_threshold lookahead_window_size lookahead_ngram_size
        lookahead_verification_set_size prompt_embedding_table prompt_table_extra_ids
        prompt_vocab_size cross_attention_mask mrope_rotary_cos_sin mrope_position_deltas
        skip_cross_attn_blocks lora_task_id lora_weights lora_config context_phase_params
        retention_token_range_starts retention_token_range_ends retention_token_range_priorities
        retention_token_range_durations_ms retention_decode_priority retention_decode_duration_ms
        guided_decoding_guide_type guided_decoding_guide priority min_p min_length random_seed
        ignore_eos stop_token_ids allowed_token_ids logit_bias_ids logit_bias_values
        include_stop_str_in_output num_log_probs num_draft_tokens cache_salt return_finish_reason
        return_num_cached_tokens text_context
    """,
    Frontend.VLLM: """
        text_input messages image stream sampling_parameters exclude_input_in_output
        return_finish_reason return_cumulative_logprob return_logprobs return_num_input_tokens
        return_num_output_tokens return_num_cached_tokens embedding_request priority min_length
        logit_bias_ids logit_bias_values num_draft_tokens cache_salt
    """,
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output as a configuration declares it."""

    name: str
    kind: Kind
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelConfiguration:
    """The contents of a model's `config.pbtxt` other than its tensors and the ensemble's wiring.

    Attributes:
        name: the shipped model's name.
        head: comment at the top.
        instances: comment above the instance group.
        parameters: groups of parameters, each a comment and a map from key to value.
        is_decoupled: whether a request may have any number of responses.
        has_rows: whether tensors have a batch dimension.
    """

    name: str
    head: str = ""
    instances: str = ""
    parameters: tuple[tuple[str, Mapping[str, str]], ...] = ()
    is_decoupled: bool = True
    has_rows: bool = True


def _engine_parameters() -> dict[str, str]:
    """Each field of `EngineConfig` with its default."""
    defaults = {"model_dir": "default"}
    return {
        field.name: defaults.get(field.name) or _written(field.default)
        for field in dataclasses.fields(EngineConfig)
    }


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_TEXT_PARAMETERS = {
    "model_dir": "default",
    "add_special_tokens": "true",
    "skip_special_tokens": "true",
    "max_model_len": "0",
}
_LLM_NAME = {"llm_model_name": "llm"}
_FORWARDED = {"forwarded_headers": ""}
# Overridden by --otlp-endpoint, --record and --record-prompts of `naiad serve`.
_TRACED = {"otlp_endpoint": "", "record_file": "", "record_prompts": "false"}
_ECHOES = {"exclude_input_in_output": "false"}

CONFIGURATIONS: Mapping[str, ModelConfiguration] = {
    each.name: each
    for each in (
        ModelConfiguration(
            "ensemble", head="text_input -> tokenizer -> llm -> detokenizer -> text_output. Wiring only."
        ),
        ModelConfiguration(
            "tokenizer", parameters=(("", _TEXT_PARAMETERS | _FORWARDED),), is_decoupled=False
        ),
        ModelConfiguration(
            "llm",
            parameters=(
                (
                    "The engine: each may be overridden by the option of the same name of `naiad serve`.",
                    _engine_parameters(),
                ),
                ("What requests get.", _ECHOES | _FORWARDED | _TRACED),
            ),
        ),
        ModelConfiguration(
            "detokenizer",
            instances="One instance keeps the order of a stream's chunks. No dynamic batching: after it "
            "Triton 2.51 does not report that a client is gone.",
            parameters=(
                ("", {"model_dir": "default", "skip_special_tokens": "true"} | _LLM_NAME | _FORWARDED),
            ),
        ),
        ModelConfiguration(
            "text",
            head="text_input -> text_output in one process: another client of the engine of `llm`.",
            parameters=(
                ("", _TEXT_PARAMETERS | _LLM_NAME | _FORWARDED | _TRACED),
                ("What requests get.", _ECHOES | {"accumulate_tokens": "false"}),
            ),
        ),
        ModelConfiguration(
            "vllm",
            head="A model of the vLLM backend's shape: no rows, sampling parameters as JSON. A client of the "
            "engine of `llm`.",
            parameters=(("", _TEXT_PARAMETERS | _LLM_NAME | _FORWARDED | _TRACED),),
            has_rows=False,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Choices:
    """How a repository's models differ from the shipped ones.

    Attributes:
        names: shipped model → its name in the repository; models not named here keep their names.
        max_batch_size: maximum number of rows of a request.
        is_decoupled: whether a request may have any number of responses; otherwise it has one.
        parameters: values of parameters, for each model that has them.
    """

    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    is_decoupled: bool = True
    parameters: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def name_of(self, shipped: str) -> str:
        """Return the name that a shipped model gets."""
        return self.names.get(shipped, shipped)


def inputs_of(model: str) -> dict[str, Field]:
    """Return the fields for which a model has inputs, by tensor name, in its configuration's order.

    Args:
        model: a shipped model, other than the detokenizer.
    """
    frontend = Frontend(model)
    known = fields_at(frontend)
    # `text` has the ensemble's inputs and some more.
    first = inputs_of("ensemble") if frontend is Frontend.TEXT else {}
    return first | {name: known[name] for name in _ORDERS[frontend].split()} | known


def input_tensors(model: str) -> list[Tensor]:
    """Return the inputs that a model declares, in order."""
    if model == "detokenizer":
        return [Tensor(each.detokenizer_name, each.kind, each.dims) for each in detokenizer_inputs()]
    return [Tensor(name, field.kind, field.dims) for name, field in inputs_of(model).items()]


def output_tensors(model: str) -> list[Tensor]:
    """Return the outputs that a model declares, in order."""
    if model == "tokenizer":
        return [Tensor(each.name, each.kind, each.dims) for each in TOKENIZER_TENSORS]
    if model == "detokenizer":
        return [Tensor(each.detokenizer_name, each.kind, each.dims) for each in text_tensors()]
    own = {"llm": llm_tensors(), "vllm": list(VLLM_TENSORS)}.get(model, text_tensors())
    return [Tensor(each.name, each.kind, each.dims) for each in own]


def config_text(model: str, choices: Choices | None = None) -> str:
    """Generate the text of a model's `config.pbtxt`.

    Args:
        model: one of `CONFIGURATIONS`.
        choices: changes to the model; None: as shipped.
    """
    choices = choices or Choices()
    configuration = CONFIGURATIONS[model]
    lines = _comment(configuration.head)
    is_ensemble = model == "ensemble"
    lines += [
        f'name: "{choices.name_of(model)}"',
        'platform: "ensemble"' if is_ensemble else 'backend: "python"',
        f"max_batch_size: {choices.max_batch_size if configuration.has_rows else 0}",
    ]
    if configuration.is_decoupled and choices.is_decoupled and not is_ensemble:
        lines.append("model_transaction_policy { decoupled: true }")
    lines += _tensor_lines("input", input_tensors(model), may_be_optional=True)
    lines += _tensor_lines("output", output_tensors(model), may_be_optional=False)
    if is_ensemble:
        lines += _scheduling_lines(choices)
    else:
        lines += _comment(configuration.instances)
        lines.append("instance_group [{ count: 1, kind: KIND_CPU }]")
    return "\n".join(lines + _parameter_lines(configuration, choices)) + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _LINE_WIDTH, initial_indent="# ", subsequent_indent="# ")


def _tensor_lines(heading: str, tensors: Iterable[Tensor], *, may_be_optional: bool) -> list[str]:
    lines = []
    for tensor in tensors:
        is_optional = may_be_optional and tensor.name not in _REQUIRED_TENSORS
        dims = ", ".join(map(str, tensor.dims))
        lines.append(
            f'  {{ name: "{tensor.name}", data_type: TYPE_{tensor.kind.value}, dims: [{dims}]'
            f"{', optional: true' if is_optional else ''} }}"
        )
    return [f"{heading} [", *(f"{line}," for line in lines[:-1]), lines[-1], "]"]


def _parameter_lines(configuration: ModelConfiguration, choices: Choices) -> list[str]:
    lines = []
    for comment, group in configuration.parameters:
        lines += ["", *_comment(comment)] if comment else []
        for key, default in group.items():
            lines.append(_parameter(key, _chosen(key, default, choices)))
    return lines


def _chosen(key: str, default: str, choices: Choices) -> str:
    if key in _LLM_NAME:
        return choices.name_of(default)
    return choices.parameters.get(key, default)


def _parameter(key: str, text: str) -> str:
    return f'parameters {{ key: "{key}" value: {{ string_value: "{_escaped(text)}" }} }}'


def _escaped(text: str) -> str:
    return "".join(f"\\{ord(each):03o}" if each in '"\\' or ord(each) < 32 else each for each in text)


def _scheduling_lines(choices: Choices) -> list[str]:
    """Generate the ensemble's steps: the name, input map and output map of each.

    A tensor between two steps has `llm`'s name for it, preceded by an underscore.
    """
    asked = inputs_of("ensemble").items()
    tokenized = {each.name: each.llm for each in TOKENIZER_TENSORS if each.llm}
    answered = {each.name: f"_{each.name}" for each in llm_tensors() if each.path is not Path.LLM_ONLY}
    steps: list[tuple[str, Mapping[str, str], Mapping[str, str]]] = [
        (
            "tokenizer",
            {inner: name for name, field in asked if (inner := field.name_at(Frontend.TOKENIZER))},
            {name: f"_{inner}" for name, inner in tokenized.items()},
        ),
        (
            "llm",
            # If the tokenizer outputs a field, its output replaces the client's field.
            {inner: name for name, field in asked if (inner := field.name_at(Frontend.LLM))}
            | {inner: f"_{inner}" for inner in tokenized.values()},
            answered,
        ),
        (
            "detokenizer",
            {each.detokenizer_name: answered[each.name] for each in detokenizer_inputs()},
            {each.detokenizer_name: each.name for each in text_tensors()},
        ),
    ]
    blocks = [
        [
            "    {",
            f'      model_name: "{choices.name_of(name)}"',
            "      model_version: -1",
            *(f'      input_map {{ key: "{inner}" value: "{outer}" }}' for inner, outer in inputs.items()),
            *(f'      output_map {{ key: "{inner}" value: "{outer}" }}' for inner, outer in outputs.items()),
            "    }",
        ]
        for name, inputs, outputs in steps
    ]
    for block in blocks[:-1]:
        block[-1] += ","
    return ["ensemble_scheduling {", "  step [", *(line for block in blocks for line in block), "  ]", "}"]
