"""Fields that are declared and not served: refused by name unless they hold the value that means "off"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from naiad.errors import InvalidRequestError

# Names of reference and A2 fields that are declared but not served, with the values that switch
# them off. An empty tensor, or one of empty strings, is always "off".
NOT_SERVED: Mapping[str, tuple[float, ...]] = {
    "decoder_input_ids": (),
    "decoder_input_lengths": (0, 1),
    "encoder_input_features": (),
    "encoder_output_lengths": (),
    "draft_logits": (),
    "draft_acceptance_threshold": (),
    "lookahead_window_size": (),
    "lookahead_ngram_size": (),
    "lookahead_verification_set_size": (),
    "prompt_embedding_table": (),
    "prompt_table_extra_ids": (),
    "prompt_table_extra_id": (),
    "prompt_vocab_size": (0,),
    "cross_attention_mask": (),
    "mrope_rotary_cos_sin": (),
    "mrope_position_deltas": (),
    "skip_cross_attn_blocks": (),
    "lora_task_id": (0,),
    "lora_weights": (),
    "lora_config": (),
    "context_phase_params": (),
    "guided_decoding_guide_type": (),
    "guided_decoding_guide": (),
    "decoder_text_input": (),
    "image_input": (),
    "image_bytes_input": (),
    "image_url_input": (),
    "video_bytes_input": (),
    "use_draft_logits": (0,),
}
# The reference's tokenizer makes one of these for every prompt, and clients hand it on: for models
# without an encoder it says nothing.
_ONE_IS_OFF = ("decoder_input_ids",)


def refuse_unserved(sent: Mapping[str, Any]) -> None:
    """Refuse each field of `NOT_SERVED` that asks for something.

    Args:
        sent: tensors (arrays) or parameters (plain values) by name.

    Raises:
        InvalidRequestError: names the field.
    """
    for name, value in sent.items():
        if name in _ONE_IS_OFF and np.shape(value)[1:] == (1,):
            continue
        if name in NOT_SERVED and not _is_off(value, NOT_SERVED[name]):
            raise InvalidRequestError(f"{name} is not supported by this version of Naiad: do not send it")


def _is_off(value: Any, off_values: tuple[float, ...]) -> bool:
    flat = np.asarray(value).reshape(-1)
    if flat.dtype.kind in "OSU":
        return all(item in (b"", "") for item in flat.tolist())
    return all(item in off_values for item in flat.tolist())
