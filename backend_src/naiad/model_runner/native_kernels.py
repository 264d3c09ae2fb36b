"""Whether a model's steps are computed by the native kernels of this machine, and by which."""

from __future__ import annotations

import logging

import torch

from naiad.config import EngineConfig
from naiad.config.cores import core_ids
from naiad.errors import ConfigError
from naiad.model_runner.draft_choice import quantizations
from naiad_kernels.native.build import BuildError, first_of, load
from naiad_kernels.native.library import Library, Team
from naiad_kernels.native.variants import usable_variants

_LOG = logging.getLogger(__name__)
_DTYPES = (torch.float32, torch.bfloat16)


def native_team(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, num_threads: int
) -> Team | None:
    """Start the threads that compute steps natively.

    Returns:
        None: torch's ops compute the steps. The log says why, unless the configuration asks for torch.

    Raises:
        ConfigError: the configuration demands what only native kernels do, and there are none.
    """
    if device.type != "cpu":
        return None
    try:
        team = _load(config, dtype).new_team(num_threads)
        if config.cpu_affinity:
            team.pin(core_ids(config.cpu_affinity)[:num_threads])
        return team
    except (BuildError, OSError) as error:
        if config.batch_invariant:
            expected = f"false: torch's products depend on how many tokens a step has, and {error}"
            raise ConfigError("batch_invariant", True, expected) from error
        if config.quantization != "none":
            expected = f"none: only native kernels compute it, and {error}"
            raise ConfigError("quantization", config.quantization, expected) from error
        if quantizations(config)[-1] != "none":
            expected = f"auto: only native kernels compute it, and {error}"
            raise ConfigError("draft_quantization", config.draft_quantization, expected) from error
        if config.cpu_affinity:
            expected = f"no cores: torch computes the steps and does not pin its threads, and {error}"
            raise ConfigError("cpu_affinity", config.cpu_affinity, expected) from error
        if config.cpu_kernels == "native":
            raise ConfigError("cpu_kernels", "native", f"auto or torch: {error}") from error
        if config.cpu_kernels == "auto":
            _LOG.warning("torch computes the steps, slower than the native kernels would: %s", error)
        return None


def _load(config: EngineConfig, dtype: torch.dtype) -> Library:
    if config.cpu_kernels == "torch":
        raise BuildError("cpu_kernels is torch")
    if config.tensor_parallel_size > 1:
        raise BuildError(
            f"they are for whole matrices, and {config.tensor_parallel_size} processes share each"
        )
    if dtype not in _DTYPES:
        raise BuildError(f"they compute in float32 and bfloat16, not in {dtype}")
    if config.kv_cache_dtype == "fp8":
        raise BuildError("they have no KV cache in fp8")
    (library, variant), problem = first_of(usable_variants(), lambda each: (load(each), each))
    if problem is not None:
        _LOG.warning("%s kernels compute the steps, not the fastest ones: %s", variant.name, problem)
    return library
