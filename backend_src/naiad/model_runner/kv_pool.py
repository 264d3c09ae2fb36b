"""The KV cache's tensors and their size."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch

from naiad.config import EngineConfig, ModelConfig
from naiad.errors import ConfigError
from naiad.kv_cache.kv_group import KVGroupSpec, max_held_blocks
from naiad.models.large_pages import LargePages, large_memory, own_memory
from naiad_kernels.native.kv_layout import GROUP_TOKENS, native_keys, native_values
from naiad_kernels.paged_attention.layout import CacheLayout, fixed_split_for
from naiad_kernels.store_kv import LayerCache


class KVPool:
    """Keys and values of all blocks, in one allocation for each group of layers.

    The memory is zeroed, because attention multiplies the unwritten rest of a block by zero, and zero
    times NaN is NaN.

    Attributes:
        num_blocks: number of blocks of the smallest group; smaller ids are valid in all groups.
        layers: each layer's cache.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        is_native: bool = False,
        codes: torch.dtype | None = None,
        pages: LargePages | None = None,
    ) -> None:
        """Allocate the pool; on a CPU the system provides memory only as blocks are written.

        Args:
            config: the model's configuration.
            num_blocks: number of blocks for each of its groups of layers.
            block_size: tokens in a block.
            dtype: dtype of keys and values, or, if they are codes, of the computation.
            device: device of keys and values.
            is_native: whether keys are laid out for the native kernels.
            codes: int8 or float8_e4m3fn: keys and values are codes, with a scale for each token and KV head.
            pages: provides large pages on a CPU in the background; None: it has them at once.
        """
        self._native_dtype = dtype if is_native else None
        self.num_blocks = min(num_blocks)
        self._tensors: list[torch.Tensor] = []
        self._scales: list[torch.Tensor | None] = []
        layers: dict[int, LayerCache] = {}
        for group, num in zip(config.layer_groups, num_blocks, strict=True):
            shape = (len(group.layers), 2, num, config.num_kv_heads, block_size, config.head_dim)
            tensor = _zeros(shape, codes or dtype, device, pages)
            scales = _zeros(shape[:-1], torch.float32, device, pages) if codes else None
            self._tensors.append(tensor)
            self._scales.append(scales)
            for place, index in enumerate(group.layers):
                key_scale, value_scale = (None, None) if scales is None else scales[place]
                key, value = tensor[place]
                layers[index] = LayerCache(key, value, key_scale, value_scale)
        self.layers = [layers[index] for index in range(config.num_layers)]

    def copy(self, copies: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Copy (source, destination) blocks of each group, in order, in every layer of the group."""
        for tensor, scales, pairs in zip(self._tensors, self._scales, copies, strict=True):
            for source, target in pairs:
                tensor[:, :, target] = tensor[:, :, source]
                if scales is not None:
                    scales[:, :, target] = scales[:, :, source]

    def first_layers(self, num_layers: int) -> KVPool:
        """A view of the pool for a model of fewer layers; copying and clearing still affect all layers."""
        part = copy.copy(self)
        part.layers = self.layers[:num_layers]
        return part

    def zero_slots(self, slots: Sequence[Sequence[int]]) -> None:
        """Set slots of each group to 0 in every layer of the group."""
        for tensor, scales, places in zip(self._tensors, self._scales, slots, strict=True):
            index = torch.tensor(places, dtype=torch.int64, device=tensor.device)
            block_size = tensor.shape[4]
            blocks, offsets = index // block_size, index % block_size
            if scales is not None:
                scales[:, :, blocks, :, offsets] = 0
            if self._native_dtype is not None:
                keys = native_keys(tensor[:, 0], self._native_dtype)
                values = native_values(tensor[:, 1], self._native_dtype)
                keys[:, blocks, :, offsets // GROUP_TOKENS, :, offsets % GROUP_TOKENS] = 0
                together = values.shape[-1]
                values[:, blocks, :, offsets // together, :, offsets % together] = 0
            else:
                tensor[:, :, blocks, :, offsets] = 0

    def zero(self, block_ids: Sequence[Sequence[int]]) -> None:
        """Set blocks of each group to 0 in every layer of the group."""
        for tensor, scales, blocks in zip(self._tensors, self._scales, block_ids, strict=True):
            index = torch.tensor(list(blocks), dtype=torch.int64, device=tensor.device)
            tensor.index_fill_(2, index, 0)
            if scales is not None:
                scales.index_fill_(2, index, 0)


def _zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pages: LargePages | None
) -> torch.Tensor:
    """Zeros; on a CPU in memory of its own, which the system provides in large pages as it is written.

    A first step writes to each layer's keys and values, and would wait for a large page for each.
    """
    # A stage of a model may have no layer of a group, and no memory is mapped for nothing.
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    if pages is None:
        return torch.frombuffer(large_memory(num_bytes), dtype=dtype).view(shape)
    tensor = torch.frombuffer(own_memory(num_bytes), dtype=dtype).view(shape)
    pages.enlarge(tensor, [part.data_ptr() for layer in tensor for part in layer])
    return tensor


def cache_layout(
    config: EngineConfig,
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    is_native: bool = False,
) -> CacheLayout:
    """The layout of a model's KV pool.

    Args:
        config: the engine's configuration.
        model_config: the model's.
        dtype: the computation's dtype.
        device: device of keys and values.
        is_native: whether keys are laid out for the native kernels.
    """
    limit = model_config.max_position_embeddings
    return CacheLayout(
        num_heads=model_config.num_heads,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        block_size=config.block_size,
        dtype=dtype,
        device=device,
        fixed_split=fixed_split_for(limit) if config.batch_invariant else 0,
        is_native=is_native,
    )


def kv_group_specs(
    config: EngineConfig,
    model_configs: Sequence[ModelConfig],
    dtype: torch.dtype,
    kv_cache_bytes: int,
    max_step_tokens: int,
    codes: torch.dtype | None = None,
) -> list[KVGroupSpec]:
    """The KV groups of a model, and how many blocks of each fit in memory.

    All groups get the same number of blocks, except that none gets more than `max_num_seqs` sequences
    of full length can use: in a group with a window these are few, and the other groups get the rest.

    The keys and values of all layers of a draft model are in blocks of the first group. If that group
    has a window, it is treated as having none, because the draft model may see more.

    Args:
        config: the engine's configuration: block size and limits.
        model_configs: the served model and, if there is one, the draft model.
        dtype: dtype of keys and values, if they are not codes.
        kv_cache_bytes: memory for all groups and models.
        max_step_tokens: maximum tokens of one sequence in a step.
        codes: dtype of the codes, if keys and values are codes with scales.

    Raises:
        ConfigError: not even one block of each group fits.
    """
    target, *drafts = model_configs
    sizes = block_bytes(config, model_configs, dtype, codes)
    windows = [group.window or None for group in target.layer_groups]
    if drafts:
        windows[0] = None
    if kv_cache_bytes < sum(sizes):
        raise ConfigError("kv_cache_bytes", kv_cache_bytes, f"at least one block of {sum(sizes)} bytes")
    limit = target.max_position_embeddings
    longest = -(-min(config.max_model_len or limit, limit) // config.block_size)
    useful = [longest * config.max_num_seqs] * len(windows)
    for index, window in enumerate(windows):
        if window is not None:
            # One more block per sequence, which must stay free when a preempted sequence is admitted again.
            held = max_held_blocks(window, max_step_tokens, config.block_size) + 1
            useful[index] = min(longest, held) * config.max_num_seqs
    counts = _shares(kv_cache_bytes, sizes, useful)
    return [KVGroupSpec(count, window) for count, window in zip(counts, windows, strict=True)]


def block_bytes(
    config: EngineConfig,
    model_configs: Sequence[ModelConfig],
    dtype: torch.dtype,
    codes: torch.dtype | None = None,
) -> list[int]:
    """The size of a block of each KV group; the arguments are those of `kv_group_specs`."""
    target, *drafts = model_configs
    target_bytes = _layer_block_bytes(target, config, dtype, codes)
    sizes = [len(group.layers) * target_bytes for group in target.layer_groups]
    sizes[0] += sum(each.num_layers * _layer_block_bytes(each, config, dtype, codes) for each in drafts)
    return sizes


def _layer_block_bytes(
    model_config: ModelConfig, config: EngineConfig, dtype: torch.dtype, codes: torch.dtype | None
) -> int:
    scale_bytes = 0 if codes is None else torch.float32.itemsize
    vector_bytes = model_config.head_dim * (codes or dtype).itemsize + scale_bytes
    return 2 * model_config.num_kv_heads * config.block_size * vector_bytes


def _shares(num_bytes: int, sizes: Sequence[int], useful: Sequence[int]) -> list[int]:
    """The number of blocks of each size that fit: equal numbers, but of no size more than are useful."""
    counts = list(useful)
    growing = set(range(len(sizes)))
    while growing:
        share = num_bytes // sum(sizes[index] for index in growing)
        enough = {index for index in growing if useful[index] <= share}
        if not enough:
            for index in growing:
                counts[index] = share
            break
        num_bytes -= sum(sizes[index] * useful[index] for index in enough)
        growing -= enough
    return counts
