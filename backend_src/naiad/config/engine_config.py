"""`EngineConfig`: the user's settings. Each field is one `config.pbtxt` parameter and one option."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_type_hints

from naiad.config.cores import core_ids
from naiad.config.kv_events import kv_event_settings
from naiad.errors import ConfigError

DTYPES = ("auto", "bfloat16", "float32", "float16")
DEVICES = ("cpu", "cuda")
CPU_KERNELS = ("auto", "native", "torch")
CPU_QUANTIZATIONS = ("none", "int8", "int4")
QUANTIZATIONS = (*CPU_QUANTIZATIONS, "fp8")
DRAFT_QUANTIZATIONS = ("auto", *QUANTIZATIONS)
KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "float32", "int8", "fp8")
SCHEDULING_POLICIES = ("priority", "fcfs", "shortest_prompt")
DRAFTERS = ("auto", "none", "ngram", "suffix", "draft_model", "self")
MAX_SPECULATIVE_TOKENS = 16
MAX_RANKS = 64
MAX_SHARED_DRAFT_TOKENS = 1 << 24
DEFAULT_SHARED_DRAFT_TOKENS = 1 << 17
DEFAULT_KV_FRACTION = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """The engine's settings; for some fields 0 means "chosen at start".

    Attributes:
        model_dir: directory with config.json, *.safetensors and tokenizer.json.
        served_name: the name of the model for clients that choose among several. Empty: the name of the
            checkpoint.
        dtype: of weights and activations. "auto": bfloat16 if the device
            computes in it (CUDA; CPUs with avx512_bf16 or AMX), else float32.
        device: "cpu" or "cuda".
        cpu_kernels: what computes a step on a CPU: "native" (compiled for this machine at the first start),
            "torch", or "auto": native where it can be had, else torch. On CUDA it has no meaning.
        quantization: how weights are rounded at load: "none"; "int8": eight bits with a scale for each
            output; "int4": four bits with a scale and a zero point for each 32 inputs, and eight in the head;
            "fp8", on a GPU from sm_90 on: float8_e4m3fn with a scale for each output, and int8 in the head.
            Inputs of a layer are then rounded too: on a CPU, whose native kernels compute this, to eight bits
            with a scale for each 64 of them; on a GPU only for "fp8", with a scale for each token. On a GPU
            a layer that the checkpoint has quantised may keep its form.
        start_cache: on a CPU, keep what a start prepares for the next one: the weights as the native kernels
            read them, and measured costs of steps. They are in .naiad in the model's directory, or in the
            user's cache if that is read-only.
        large_pages: on a CPU, move the weights that the start cache has into memory of the engine's own, in
            pages of 2 MiB, which the native kernels read faster, if the system has such pages and enough
            memory is available. The engine serves meanwhile. False: they stay mapped from the start cache,
            where engines of the same model share them.
        tensor_parallel_size: number of processes that share the model; each has its part of every matrix and
            of the KV cache, on CUDA on a GPU of its own. At most the checkpoint's number of heads. With more
            than one, torch computes the steps on a CPU, and on CUDA steps are not overlapped.
        pipeline_parallel_size: number of stages that share the layers, one after another; each is
            `tensor_parallel_size` processes. At most the checkpoint's number of layers. With more than one,
            steps on CUDA are neither captured as graphs nor overlapped. Stages of one process are computed
            on a CPU as the whole model is.
        cpu_threads: threads that compute a step on a CPU, at most as many as the process may use cores.
            0: one for each physical core, or for each core of cpu_affinity. The native kernels use fewer
            for a while when other programs need the cores. All processes of a split model share them.
        cpu_affinity: cores that the native kernels' threads are pinned to, one each, such as "0,2-3"; at
            least cpu_threads. Empty: not pinned. Other than empty only where native kernels compute.
        max_num_seqs: maximum sequences that run at the same time.
        max_num_batched_tokens: maximum tokens that a step computes, at least max_num_seqs.
            0: measured at start on a CPU so that a step stays under 250 ms; 2,048 on CUDA.
        max_model_len: maximum prompt + output tokens of a sequence. 0: the checkpoint's limit.
            Never more than the KV cache holds.
        block_size: tokens in a KV cache block, a power of two in 16 … 128.
        kv_cache_dtype: of keys and values in the KV cache: "auto" or the name of the dtype that the model
            computes in; "int8" or "fp8" (float8_e4m3fn): eight bits, with a measured scale for each token
            and KV head. The native kernels have no "fp8"; on CUDA it needs compute capability 9.0.
        kv_cache_bytes: size of the KV cache. 0: on a CPU a quarter of the memory that is
            available at start, at most 2 GiB; on CUDA what kv_cache_memory_fraction leaves.
        kv_cache_memory_fraction: fraction f of a GPU's memory that may be used, 0 < f ≤ 1: the KV cache
            gets what weights and the largest step leave of it. A kv_cache_bytes other than 0 takes
            precedence. On a CPU it has no meaning, and only the default is accepted.
        cuda_graphs: on CUDA, capture steps of few tokens at start, in several sizes, and replay them.
        batch_invariant: make a request's logits bitwise equal in any batch. On CUDA this is slower; on a CPU
            the native kernels always do it, and torch cannot.
        overlap_steps: on CUDA, launch a step before the previous step's ids are on the host, if nothing
            in it depends on them.
        enable_prefix_caching: reuse the KV of earlier prompts and outputs.
        scheduling_policy: "priority", "fcfs" or "shortest_prompt".
        priority_aging_ms: waiting time that makes up for one unit of priority, or for a
            hundred prompt tokens.
        max_queued_requests: maximum sequences that wait, in addition to the `max_num_seqs` running ones;
            further ones are refused.
        max_queued_tokens: maximum prompt tokens that wait. 0: no limit.
        target_first_token_ms: a request is refused at once if its first token is expected later, by what
            waits and what steps have taken lately, or after its own deadline. 0: none is.
        drafter: source of draft tokens, several of which are checked in one step: "ngram"
            (what followed the last few tokens earlier), "suffix" (the same, also in the tenant's
            earlier outputs), "draft_model" (a smaller model), "self" (the model's own first
            layers), or "none". "auto": "suffix" where native kernels compute the steps, because drafts
            change no token there; else "none".
        draft_model: for "draft_model": directory of a checkpoint with the same vocabulary.
        draft_quantization: for "draft_model": how its weights are rounded at load, as `quantization` has it.
            "auto": as the target's.
        num_draft_layers: for "self": the number of layers. 0: a quarter of them.
        num_speculative_tokens: maximum draft tokens of a sequence in a step, 1 … 16.
        max_shared_draft_tokens: for "suffix": at most how many tokens of ended outputs are kept for later
            drafts, at about 100 bytes each, in four parts; of one output at most a part. 0: a sequence has
            drafts from its own text only.
        usage_file: absolute path of the file that gets what each tenant uses, as lines of JSON. Empty: none.
        kv_events_endpoint: where routers subscribe to what comes to the prefix cache and goes from it, in
            vLLM's messages over ZeroMQ: tcp://ADDRESS:PORT, or a port of the loopback address. Empty:
            nothing is published. Subscribers are not authenticated.
        kv_events_replay_endpoint: where subscribers ask for events that they have missed. Empty: nowhere.
        kv_events_topic: with which every message begins, such as kv@POD@MODEL for llm-d.
        kv_events_token_ids: events contain the blocks' token ids, which is to say prompts and outputs; only
            blocks of requests without a cache_salt are published then. False: events contain hashes alone.
    """

    model_dir: str
    served_name: str = ""
    dtype: str = "auto"
    device: str = "cpu"
    cpu_kernels: str = "auto"
    quantization: str = "none"
    start_cache: bool = True
    large_pages: bool = True
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    cpu_threads: int = 0
    cpu_affinity: str = ""
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 0
    max_model_len: int = 0
    block_size: int = 64
    kv_cache_dtype: str = "auto"
    kv_cache_bytes: int = 0
    kv_cache_memory_fraction: float = DEFAULT_KV_FRACTION
    cuda_graphs: bool = True
    batch_invariant: bool = False
    overlap_steps: bool = True
    enable_prefix_caching: bool = True
    scheduling_policy: str = "priority"
    priority_aging_ms: int = 10_000
    max_queued_requests: int = 1024
    max_queued_tokens: int = 0
    target_first_token_ms: int = 0
    drafter: str = "auto"
    draft_model: str = ""
    draft_quantization: str = "auto"
    num_draft_layers: int = 0
    num_speculative_tokens: int = 8
    max_shared_draft_tokens: int = DEFAULT_SHARED_DRAFT_TOKENS
    usage_file: str = ""
    kv_events_endpoint: str = ""
    kv_events_replay_endpoint: str = ""
    kv_events_topic: str = ""
    kv_events_token_ids: bool = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: a value is not allowed; the message names the key, the value and what was expected.
        """
        if self.dtype not in DTYPES:
            raise ConfigError("dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        if self.device not in DEVICES:
            raise ConfigError("device", self.device, f"one of {', '.join(DEVICES)}")
        if self.cpu_kernels not in CPU_KERNELS:
            raise ConfigError("cpu_kernels", self.cpu_kernels, f"one of {', '.join(CPU_KERNELS)}")
        self._check_quantization()
        self._check_cores()
        if not 1 <= self.max_num_seqs <= 4096:
            raise ConfigError("max_num_seqs", self.max_num_seqs, "1 … 4096")
        budget = self.max_num_batched_tokens
        if budget and not self.max_num_seqs <= budget <= 1 << 20:
            expected = f"0 (auto) or max_num_seqs = {self.max_num_seqs} … {1 << 20}"
            raise ConfigError("max_num_batched_tokens", budget, expected)
        if self.max_model_len and not 2 <= self.max_model_len <= 1 << 24:
            raise ConfigError("max_model_len", self.max_model_len, "0 (the checkpoint's) or 2 … 16777216")
        self._check_kv_cache()
        self._check_queue()
        self._check_speculation()
        self._check_ranks()
        if self.usage_file and not Path(self.usage_file).is_absolute():
            raise ConfigError("usage_file", self.usage_file, "an absolute path")
        kv_event_settings(self)

    def _check_quantization(self) -> None:
        kinds = {"quantization": QUANTIZATIONS, "draft_quantization": DRAFT_QUANTIZATIONS}
        for key, allowed in kinds.items():
            value = getattr(self, key)
            if value not in allowed:
                raise ConfigError(key, value, f"one of {', '.join(allowed)}")
            if value not in ("none", "auto"):
                self._check_rounded(key, value, allowed[0])

    def _check_rounded(self, key: str, value: str, usual: str) -> None:
        if self.device != "cpu":
            if self.batch_invariant:
                expected = f"{usual} with batch_invariant: kernels of a fixed order read whole weights"
                raise ConfigError(key, value, expected)
            return
        if self.cpu_kernels == "torch":
            raise ConfigError(key, value, f"{usual}: on a CPU only the native kernels compute it")
        if value not in CPU_QUANTIZATIONS:
            expected = f"{usual}, int8 or int4: a CPU does not multiply FP8, and int8 is as small"
            raise ConfigError(key, value, expected)

    def _check_cores(self) -> None:
        if self.cpu_threads < 0:
            raise ConfigError("cpu_threads", self.cpu_threads, "0 (chosen at start) or a number of threads")
        if not self.cpu_affinity:
            return
        num_cores = len(core_ids(self.cpu_affinity))
        if num_cores < self.cpu_threads:
            expected = f"at least cpu_threads = {self.cpu_threads} cores"
            raise ConfigError("cpu_affinity", self.cpu_affinity, expected)
        if self.device != "cpu" or self.cpu_kernels == "torch":
            expected = "no cores: only the native kernels of a CPU pin their threads"
            raise ConfigError("cpu_affinity", self.cpu_affinity, expected)

    def _check_kv_cache(self) -> None:
        if self.block_size not in (16, 32, 64, 128):
            raise ConfigError("block_size", self.block_size, "16, 32, 64 or 128")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            expected = f"one of {', '.join(KV_CACHE_DTYPES)}"
            raise ConfigError("kv_cache_dtype", self.kv_cache_dtype, expected)
        if self.kv_cache_bytes < 0:
            raise ConfigError("kv_cache_bytes", self.kv_cache_bytes, "0 (auto) or a number of bytes")
        fraction = self.kv_cache_memory_fraction
        if not 0 < fraction <= 1:
            expected = "a share of the GPU's memory, 0 < f ≤ 1"
            raise ConfigError("kv_cache_memory_fraction", fraction, expected)
        if self.device == "cpu" and fraction != DEFAULT_KV_FRACTION:
            expected = f"{DEFAULT_KV_FRACTION}, the default: on a CPU kv_cache_bytes sizes the KV cache"
            raise ConfigError("kv_cache_memory_fraction", fraction, expected)

    def _check_queue(self) -> None:
        if self.scheduling_policy not in SCHEDULING_POLICIES:
            expected = f"one of {', '.join(SCHEDULING_POLICIES)}"
            raise ConfigError("scheduling_policy", self.scheduling_policy, expected)
        if not 1 <= self.priority_aging_ms <= 1 << 31:
            raise ConfigError("priority_aging_ms", self.priority_aging_ms, f"1 … {1 << 31}")
        if self.max_queued_requests < 0:
            raise ConfigError("max_queued_requests", self.max_queued_requests, "at least 0")
        if self.max_queued_tokens < 0:
            raise ConfigError("max_queued_tokens", self.max_queued_tokens, "0 (no bound) or a number")
        if self.target_first_token_ms < 0:
            expected = "0 (no target) or a number of milliseconds"
            raise ConfigError("target_first_token_ms", self.target_first_token_ms, expected)

    def _check_speculation(self) -> None:
        if self.drafter not in DRAFTERS:
            raise ConfigError("drafter", self.drafter, f"one of {', '.join(DRAFTERS)}")
        if self.drafter == "draft_model" and not self.draft_model:
            raise ConfigError("draft_model", "", "a model directory: drafter = 'draft_model' needs one")
        if self.drafter != "draft_model" and self.draft_model:
            expected = f"none: drafter = {self.drafter!r} uses no draft model"
            raise ConfigError("draft_model", self.draft_model, expected)
        if self.drafter != "draft_model" and self.draft_quantization != "auto":
            expected = f"auto: drafter = {self.drafter!r} uses no draft model"
            raise ConfigError("draft_quantization", self.draft_quantization, expected)
        if self.num_draft_layers < 0 or (self.num_draft_layers and self.drafter != "self"):
            expected = "0 (a quarter of the layers) or a number of layers, with drafter = 'self'"
            raise ConfigError("num_draft_layers", self.num_draft_layers, expected)
        if not 1 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            expected = f"1 … {MAX_SPECULATIVE_TOKENS}"
            raise ConfigError("num_speculative_tokens", self.num_speculative_tokens, expected)
        num_shared = self.max_shared_draft_tokens
        if not 0 <= num_shared <= MAX_SHARED_DRAFT_TOKENS:
            expected = f"0 (nothing is kept) … {MAX_SHARED_DRAFT_TOKENS}"
            raise ConfigError("max_shared_draft_tokens", num_shared, expected)
        if self.drafter not in ("auto", "suffix") and num_shared != DEFAULT_SHARED_DRAFT_TOKENS:
            expected = f"{DEFAULT_SHARED_DRAFT_TOKENS} (the default): drafter = {self.drafter!r} keeps none"
            raise ConfigError("max_shared_draft_tokens", num_shared, expected)

    def _check_ranks(self) -> None:
        size = self.tensor_parallel_size
        if not 1 <= size <= MAX_RANKS:
            raise ConfigError("tensor_parallel_size", size, f"1 … {MAX_RANKS}")
        stages = self.pipeline_parallel_size
        if not 1 <= stages <= MAX_RANKS // size:
            what = f"1 … {MAX_RANKS // size}" + (f" with tensor_parallel_size = {size}" if size > 1 else "")
            raise ConfigError("pipeline_parallel_size", stages, what)
        if self.num_ranks == 1:
            return
        sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": stages}
        why = "with " + " and ".join(f"{key} = {value}" for key, value in sizes.items() if value > 1)
        if 0 < self.cpu_threads < self.num_ranks:
            raise ConfigError("cpu_threads", self.cpu_threads, f"0 or at least {self.num_ranks} {why}")
        if size > 1 and self.cpu_kernels == "native":
            expected = f"auto or torch: {why} torch computes the steps on a CPU"
            raise ConfigError("cpu_kernels", self.cpu_kernels, expected)
        if size > 1 and self.quantization != "none":
            raise ConfigError("quantization", self.quantization, f"none {why}: rounded weights are not split")
        if self.cpu_affinity:
            raise ConfigError("cpu_affinity", self.cpu_affinity, f"no cores {why}")
        if self.batch_invariant:
            raise ConfigError("batch_invariant", True, f"false {why}: the ranks' sums or batches may vary")
        if self.drafter in ("draft_model", "self"):
            raise ConfigError("drafter", self.drafter, f"auto, none, ngram or suffix {why}")

    @property
    def num_ranks(self) -> int:
        """Number of processes that share the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> EngineConfig:
        """Build a configuration from `config.pbtxt` parameters or command-line options.

        Args:
            parameters: field name → text; absent, empty or an unfilled "${…}" = the default.

        Raises:
            ConfigError: a key is unknown, or a value is not allowed.
        """
        types = get_type_hints(cls)
        values: dict[str, str | int | float | bool] = {}
        for key, text in parameters.items():
            if key not in types:
                raise ConfigError(key, text, f"one of the keys {', '.join(field_names())}")
            if not text or text.startswith("${"):
                continue
            values[key] = _parse(key, text, types[key])
        if "model_dir" not in values:
            raise ConfigError("model_dir", "", "a model directory")
        return cls(**values)  # type: ignore[arg-type]


def field_names() -> list[str]:
    """The names of all fields, in order."""
    return [field.name for field in dataclasses.fields(EngineConfig)]


def _parse(key: str, text: str, kind: type) -> str | int | float | bool:
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(key, text, "true or false")
        return text.lower() == "true"
    try:
        return kind(text)  # type: ignore[no-any-return]
    except ValueError:
        raise ConfigError(key, text, "a whole number" if kind is int else "a number") from None
