"""Lets a CPU compute as a GPU would: kernels in the interpreter instead of the CPU's own code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from unittest import mock

from naiad.model_runner import step_inputs
from naiad.models import layers
from naiad.sampling import sampler
from naiad.sampling.draw import draw_on_device
from naiad_kernels import gelu_and_mul, gumbel_argmax, kept_threshold, rms_norm, rotary_store_kv, silu_and_mul
from naiad_kernels.linear.quantised import reference as quantised
from naiad_kernels.paged_attention import AttentionPlan
from naiad_kernels.paged_attention.device_step import plan_device_step
from naiad_kernels.paged_attention.layout import CacheLayout
from naiad_kernels.staging import Staging


@contextmanager
def kernels_on_cpu() -> Iterator[None]:
    """Replaces the CPU's code, in a process that interprets; for models in float32."""
    from naiad_kernels.gumbel_argmax import kernel as gumbel_kernel
    from naiad_kernels.kept_threshold import kernel as threshold_kernel
    from naiad_kernels.linear.quantised import kernel as quantised_kernel
    from naiad_kernels.rms_norm import kernel as rms_norm_kernel
    from naiad_kernels.rotary_store_kv import kernel as rotary_kernel
    from naiad_kernels.silu_and_mul import kernel as gated_kernel

    patches = [
        (rms_norm.cpu, "rms_norm", rms_norm_kernel.rms_norm),
        (rms_norm.cpu, "add_rms_norm", rms_norm_kernel.add_rms_norm),
        (rotary_store_kv.cpu, "rotary_store_kv", rotary_kernel.rotary_store_kv),
        (silu_and_mul.cpu, "silu_and_mul", lambda x: gated_kernel.activate_and_mul(x, "silu")),
        (gelu_and_mul.cpu, "gelu_and_mul", lambda x, form: gated_kernel.activate_and_mul(x, f"gelu_{form}")),
        (gumbel_argmax.reference, "gumbel_argmax", gumbel_kernel.gumbel_argmax),
        (kept_threshold.reference, "kept_threshold", threshold_kernel.kept_threshold),
        *(
            (quantised, name, getattr(quantised_kernel, name))
            for name in ("w4a16_linear", "w8a16_linear", "w8a8_linear", "quantize_tokens")
        ),
        (layers, "product_adds", lambda device: False),
        (sampler, "draw", draw_on_device),
        (step_inputs, "is_staged", lambda layout: True),
        (step_inputs, "plan_attention", plan_attention),
    ]
    with ExitStack() as stack:
        for module, name, replacement in patches:
            stack.enter_context(mock.patch.object(module, name, replacement))
        yield


def plan_attention(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    layout: CacheLayout,
    staging: Staging | None = None,
) -> AttentionPlan:
    step = plan_device_step(query_lens, seq_lens, block_tables, layout, staging=staging)
    return AttentionPlan(sum(query_lens), [], [], step)
