"""The machine's resources: device, dtype, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch

from naiad.config import EngineConfig, ModelConfig
from naiad.config.cores import num_compute_threads
from naiad.config.memory import available_memory_bytes
from naiad.errors import ConfigError, StartupError
from naiad.outputs import MemoryUse
from naiad_kernels.compile_counter import CompileCounter
from naiad_kernels.linear.onednn import computes_in_bfloat16
from naiad_kernels.linear.quantised.weights import has_fp8

_GIB = 1024**3
# Fusing and reordering weights briefly holds one matrix twice.
_LOADING_OVERHEAD = 1.1
# Of a weight in four bits, with its share of a scale and a minimum.
_NIBBLE_BYTES = 5 / 8


def resolve_device(config: EngineConfig, rank: int = 0) -> torch.device:
    """Return the torch device of the configuration; each rank of a split model has a GPU of its own.

    Raises:
        ConfigError: the device is "cuda", but torch sees no CUDA device, or fewer than ranks; or weights are
            to be in FP8, which the GPU does not multiply.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device", "cuda", "cpu: PyTorch finds no CUDA device on this machine")
    for key in ("quantization", "draft_quantization"):
        if getattr(config, key) == "fp8" and not has_fp8(torch.device("cuda")):
            usual = "none" if key == "quantization" else "auto, none"
            raise ConfigError(key, "fp8", f"{usual}, int8 or int4: this GPU is older than sm_90")
    if config.num_ranks == 1:
        return torch.device("cuda")
    num_gpus, size = torch.cuda.device_count(), config.tensor_parallel_size
    if num_gpus < size:
        raise ConfigError("tensor_parallel_size", size, f"1 … {num_gpus}, the number of GPUs")
    if num_gpus < config.num_ranks:
        expected = f"1 … {num_gpus // size}: there are {num_gpus} GPUs, and each stage needs {size}"
        raise ConfigError("pipeline_parallel_size", config.pipeline_parallel_size, expected)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def num_rank_threads(config: EngineConfig) -> int:
    """The number of threads that compute a rank's part of a step on a CPU.

    Raises:
        ConfigError: this process may not use that many cores.
    """
    num_threads = num_compute_threads(config.cpu_threads, config.cpu_affinity)
    return max(1, num_threads // config.num_ranks)


def resolve_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Return the torch dtype; "auto" is bfloat16 if the device computes in it, else float32."""
    if config.dtype != "auto":
        return {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}[config.dtype]
    return torch.bfloat16 if device.type == "cuda" or computes_in_bfloat16() else torch.float32


def kv_cache_codes(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """Return the dtype of the KV cache's codes; None if keys and values are in the computation's dtype.

    Raises:
        ConfigError: keys and values are to have another dtype of 16 or 32 bits, or the GPU has no fp8.
    """
    if config.kv_cache_dtype == "int8":
        return torch.int8
    if config.kv_cache_dtype == "fp8":
        if not has_fp8(device):
            raise ConfigError("kv_cache_dtype", "fp8", "auto or int8: this GPU is older than sm_90")
        return torch.float8_e4m3fn
    name = str(dtype).removeprefix("torch.")
    if config.kv_cache_dtype not in ("auto", name):
        expected = f"auto, int8 or fp8, or {name}, in which the model computes"
        raise ConfigError("kv_cache_dtype", config.kv_cache_dtype, expected)
    return None


def compile_count(device: torch.device) -> Callable[[], int]:
    """Start counting compiled kernels and return a function that reads the count; 0 on a CPU."""
    if device.type == "cpu":
        return lambda: 0
    counter = CompileCounter()
    return lambda: counter.num_compiled


def memory_use(device: torch.device) -> MemoryUse:
    """Return the memory that this process holds; on a GPU, what torch has reserved for it."""
    cpu_bytes = psutil.Process().memory_info().rss
    if device.type != "cuda":
        return MemoryUse(cpu_bytes)
    pinned_bytes = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    return MemoryUse(cpu_bytes, torch.cuda.memory_reserved(device), pinned_bytes)


def check_memory(
    checkpoints: Sequence[tuple[str, ModelConfig]],
    quantizations: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    num_ranks: int = 1,
) -> None:
    """Refuse weights that do not fit in memory before they are loaded.

    Args:
        checkpoints: directory and configuration of each checkpoint.
        quantizations: how the weights of each are rounded.
        dtype: the dtype of the computation.
        device: the device that gets the weights.
        num_ranks: number of ranks that share the weights; on a CPU they share the memory too.

    Raises:
        StartupError: says how much memory is needed and how much is available.
    """
    needed_bytes = sum(
        _needed_bytes(path, config, kind, dtype, device)
        for (path, config), kind in zip(checkpoints, quantizations, strict=True)
    )
    if device.type == "cuda":
        needed_bytes //= num_ranks
        available_bytes, _ = torch.cuda.mem_get_info(device)
    else:
        available_bytes = available_memory_bytes()
    if needed_bytes > available_bytes:
        widths = " and ".join(str(each) for each in dict.fromkeys((dtype, *quantizations)) if each != "none")
        raise StartupError(
            f"the weights need {needed_bytes / _GIB:.1f} GiB of {device.type} memory in {widths}, "
            f"{available_bytes / _GIB:.1f} GiB are available: free memory or use a smaller model, dtype or "
            "quantization"
        )


def _needed_bytes(
    model_dir: str, config: ModelConfig, quantization: str, dtype: torch.dtype, device: torch.device
) -> int:
    stored_bytes = sum(path.stat().st_size for path in Path(model_dir).glob("*.safetensors"))
    if config.quantised is not None and device.type == "cuda" and stored_bytes:
        # Most of it stays packed; what does not is found out when it is loaded.
        return int(stored_bytes * _LOADING_OVERHEAD)
    if quantization != "none":
        return int(_rounded_bytes(config, quantization, dtype) * _LOADING_OVERHEAD)
    if config.quantised is not None:
        return int(config.num_weights * dtype.itemsize * _LOADING_OVERHEAD)
    stored_item = 4 if config.dtype == "float32" else 2
    if device.type == "cpu" and dtype == torch.float32 and config.dtype == "bfloat16":
        # Linear weights stay in 16 bits; the embedding is widened.
        embedding_bytes = config.vocab_size * config.hidden_size * dtype.itemsize
        return int((stored_bytes + embedding_bytes) * _LOADING_OVERHEAD)
    return int(stored_bytes / stored_item * dtype.itemsize * _LOADING_OVERHEAD)


def _rounded_bytes(config: ModelConfig, quantization: str, dtype: torch.dtype) -> float:
    """Projections in few bits, the head in eight, and the embedding as it is."""
    embedding_weights = config.vocab_size * config.hidden_size
    bytes_per_weight = _NIBBLE_BYTES if quantization == "int4" else 1
    projection_bytes = config.num_projection_weights * bytes_per_weight
    return projection_bytes + embedding_weights * (1 + dtype.itemsize)
