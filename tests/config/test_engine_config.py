from __future__ import annotations

import os
import re

import psutil
import pytest

from naiad.config import EngineConfig
from naiad.config.control_groups import ControlGroups
from naiad.config.cores import core_ids, num_compute_threads
from naiad.config.kv_events import KVEventSettings, is_loopback_endpoint, kv_event_settings
from naiad.errors import ConfigError


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "int8"),
        ("device", "tpu"),
        ("max_num_seqs", 0),
        ("max_num_seqs", 5000),
        ("max_num_batched_tokens", 31),
        ("max_model_len", 1),
        ("block_size", 48),
        ("kv_cache_bytes", -1),
        ("kv_cache_memory_fraction", 0.0),
        ("kv_cache_memory_fraction", 1.5),
        ("kv_cache_memory_fraction", float("nan")),
    ],
)
def test_value_that_can_not_work_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{key} = {value!r}: expected "):
        EngineConfig(model_dir="m", **{key: value})  # type: ignore[arg-type]


def test_parameters_become_fields() -> None:
    parameters = {"model_dir": "m", "block_size": "32", "device": "cuda", "kv_cache_memory_fraction": "0.5"}
    config = EngineConfig.from_parameters(parameters)
    assert (config.block_size, config.device, config.kv_cache_memory_fraction) == (32, "cuda", 0.5)


def test_a_share_of_a_gpus_memory_is_refused_on_a_cpu() -> None:
    with pytest.raises(
        ConfigError, match=r"^kv_cache_memory_fraction = 0\.5: expected 0\.9, the default: on a"
    ):
        EngineConfig(model_dir="m", kv_cache_memory_fraction=0.5)


def test_unknown_cpu_kernels_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^cpu_kernels = 'fast': expected one of auto, native, torch"):
        EngineConfig(model_dir="m", cpu_kernels="fast")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "int3"}, r"^quantization = 'int3': expected one of none, int8, int4, fp8$"),
        (
            {"quantization": "int8", "cpu_kernels": "torch"},
            r"^quantization = 'int8': expected none: on a CPU only the native kernels compute it$",
        ),
        (
            {"quantization": "fp8"},
            r"^quantization = 'fp8': expected none, int8 or int4: a CPU does not multiply FP8",
        ),
        (
            {"draft_quantization": "fp8", "drafter": "draft_model", "draft_model": "d"},
            r"^draft_quantization = 'fp8': expected auto, int8 or int4: a CPU does not multiply FP8",
        ),
        (
            {"quantization": "int4", "device": "cuda", "batch_invariant": True},
            r"^quantization = 'int4': expected none with batch_invariant",
        ),
    ],
)
def test_rounded_weights_are_refused_where_nothing_computes_them(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model_dir="m", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_a_gpu_has_rounded_weights(kind: str) -> None:
    assert EngineConfig(model_dir="m", device="cuda", quantization=kind).quantization == kind


def test_an_unknown_dtype_of_the_kv_cache_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^kv_cache_dtype = 'int4': expected one of auto, bfloat16, float16, float32, int8, fp8",
    ):
        EngineConfig(model_dir="m", kv_cache_dtype="int4")


@pytest.mark.parametrize("size", [0, -1, 65])
def test_a_number_of_ranks_that_can_not_work_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=rf"^tensor_parallel_size = {size}: expected 1 … 64"):
        EngineConfig(model_dir="m", tensor_parallel_size=size)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cpu_affinity": "0-3"}, r"^cpu_affinity = '0-3': expected no cores with tensor_parallel_size = 3"),
        ({"cpu_threads": 2}, r"^cpu_threads = 2: expected 0 or at least 3 with tensor_parallel_size = 3"),
        ({"batch_invariant": True}, r"^batch_invariant = True: expected false with tensor_parallel_size = 3"),
        ({"drafter": "self"}, r"^drafter = 'self': expected auto, none, ngram or suffix with tensor"),
        ({"drafter": "draft_model", "draft_model": "d"}, r"^drafter = 'draft_model': expected auto, none"),
    ],
)
def test_what_ranks_can_not_do_is_refused_by_name(settings: dict[str, object], message: str) -> None:
    EngineConfig(model_dir="m", **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model_dir="m", tensor_parallel_size=3, **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message.replace("tensor", "pipeline")):
        EngineConfig(model_dir="m", pipeline_parallel_size=3, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cpu_kernels": "native"}, r"^cpu_kernels = 'native': expected auto or torch: with tensor_parallel"),
        ({"quantization": "int8"}, r"^quantization = 'int8': expected none with tensor_parallel_size = 2"),
        ({"quantization": "int4"}, r"^quantization = 'int4': expected none with tensor_parallel_size = 2"),
    ],
)
@pytest.mark.parametrize("stages", [1, 3])
def test_what_stages_can_do_and_parts_of_a_matrix_can_not(
    settings: dict[str, object], message: str, stages: int
) -> None:
    EngineConfig(model_dir="m", pipeline_parallel_size=3, **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model_dir="m", tensor_parallel_size=2, pipeline_parallel_size=stages, **settings)  # type: ignore[arg-type]


def test_a_number_of_stages_that_can_not_work_is_refused() -> None:
    assert EngineConfig(model_dir="m", tensor_parallel_size=3, pipeline_parallel_size=21).num_ranks == 63
    for stages, parts, expected in (
        (0, 1, "1 … 64"),
        (65, 1, "1 … 64"),
        (22, 3, "1 … 21 with tensor_p"),
    ):
        with pytest.raises(ConfigError, match=rf"^pipeline_parallel_size = {stages}: expected {expected}"):
            EngineConfig(model_dir="m", tensor_parallel_size=parts, pipeline_parallel_size=stages)


@pytest.mark.parametrize("text", [",", "0,", "a", "0-", "-1", "2-1", "0,0", "1-3,2", "0;1", "²"])
def test_a_malformed_list_of_cores_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^cpu_affinity = '{text}': expected ids of cores such as 0,2-3"):
        EngineConfig(model_dir="m", cpu_affinity=text)


def test_a_list_of_cores_keeps_its_order() -> None:
    assert core_ids("") == ()
    assert core_ids("6, 2-4,0") == (6, 2, 3, 4, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cpu_threads": -1}, "^cpu_threads = -1: expected 0 "),
        (
            {"cpu_threads": 3, "cpu_affinity": "0-1"},
            "^cpu_affinity = '0-1': expected at least cpu_threads = 3",
        ),
        ({"cpu_kernels": "torch", "cpu_affinity": "0"}, "^cpu_affinity = '0': expected no cores"),
        ({"device": "cuda", "cpu_affinity": "0"}, "^cpu_affinity = '0': expected no cores"),
    ],
)
def test_cores_and_threads_fit_together(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model_dir="m", **settings)  # type: ignore[arg-type]


@pytest.fixture
def _cores_2_and_5(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 5})
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 8)
    monkeypatch.setattr(ControlGroups, "num_cores", lambda _, available: available)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.usefixtures("_cores_2_and_5")
def test_threads_follow_the_cores_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_compute_threads() == 2
    assert num_compute_threads(1) == 1
    assert num_compute_threads(0, "5") == 1
    assert num_compute_threads(1, "5,2") == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert num_compute_threads() == 1
    assert num_compute_threads(2) == 2


@pytest.mark.usefixtures("_cores_2_and_5")
def test_cores_that_the_process_may_not_use_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^cpu_threads = 3: expected 0 … 2, the number of cores"):
        num_compute_threads(3)
    with pytest.raises(ConfigError, match=r"^cpu_affinity = '2-3': expected some of the cores 2, 5, which"):
        num_compute_threads(0, "2-3")


@pytest.mark.parametrize("unset", ["", "${block_size}"])
def test_unset_parameter_keeps_the_default(unset: str) -> None:
    assert EngineConfig.from_parameters({"model_dir": "m", "block_size": unset}).block_size == 64


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"model_dir": "m", "blocksize": "32"}, "blocksize = '32': expected one of the keys"),
        ({"model_dir": "m", "block_size": "many"}, "block_size = 'many': expected a whole number"),
        ({"model_dir": "m", "overlap_steps": "auto"}, "overlap_steps = 'auto': expected true or false"),
        (
            {"model_dir": "m", "kv_cache_memory_fraction": "half"},
            "kv_cache_memory_fraction = 'half': expected a number",
        ),
        ({"block_size": "32"}, "model_dir"),
    ],
)
def test_bad_parameter_is_named(parameters: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_parameters(parameters)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"drafter": "oracle"},
            "^drafter = 'oracle': expected one of auto, none, ngram, suffix, draft_model, self$",
        ),
        ({"drafter": "draft_model"}, "^draft_model = '': expected a model directory"),
        ({"draft_model": "d"}, "^draft_model = 'd': expected none: drafter = 'auto'"),
        ({"drafter": "self", "draft_model": "d"}, "^draft_model = 'd': expected none: drafter = 'self'"),
        ({"num_draft_layers": 2}, "^num_draft_layers = 2: expected 0 "),
        (
            {"draft_quantization": "int3"},
            "^draft_quantization = 'int3': expected one of auto, none, int8, int4, fp8$",
        ),
        ({"draft_quantization": "int8"}, "^draft_quantization = 'int8': expected auto: drafter = 'auto'"),
        (
            {
                "drafter": "draft_model",
                "draft_model": "d",
                "draft_quantization": "int8",
                "cpu_kernels": "torch",
            },
            "^draft_quantization = 'int8': expected auto: on a CPU only the native",
        ),
        ({"drafter": "self", "num_draft_layers": -1}, "^num_draft_layers = -1: expected 0 "),
        ({"max_shared_draft_tokens": -1}, "^max_shared_draft_tokens = -1: expected 0 .* … 16777216$"),
        (
            {"drafter": "ngram", "max_shared_draft_tokens": 0},
            "^max_shared_draft_tokens = 0: expected 131072 .*: drafter = 'ngram' keeps none$",
        ),
    ],
)
def test_what_drafts_fits_together(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model_dir="m", **settings)  # type: ignore[arg-type]


ENDPOINT = {"kv_events_endpoint": "5557"}


@pytest.mark.parametrize(
    ("values", "endpoint"),
    [
        ({"kv_events_endpoint": "5557"}, "tcp://127.0.0.1:5557"),
        ({"kv_events_endpoint": "tcp://*:5557"}, "tcp://*:5557"),
        ({"kv_events_endpoint": "tcp://[::1]:5557"}, "tcp://[::1]:5557"),
        ({"kv_events_endpoint": "tcp://10.0.0.7:65535"}, "tcp://10.0.0.7:65535"),
    ],
)
def test_an_endpoint_of_kv_events_is_completed(values: dict[str, str], endpoint: str) -> None:
    settings = kv_event_settings(EngineConfig(model_dir="m", **values))  # type: ignore[arg-type]
    assert settings == KVEventSettings(endpoint)
    assert is_loopback_endpoint(endpoint) == ("127." in endpoint or "::1" in endpoint)


@pytest.mark.parametrize(
    ("key", "value", "others"),
    [
        ("kv_events_endpoint", "0", {}),
        ("kv_events_endpoint", "65536", {}),
        ("kv_events_endpoint", "localhost", {}),
        ("kv_events_endpoint", "ipc:///tmp/events", {}),
        ("kv_events_endpoint", "tcp://host", {}),
        ("kv_events_endpoint", "tcp://a:b:5557", {}),
        ("kv_events_endpoint", "tcp://a:5557\n", {}),
        ("kv_events_endpoint", "5557", {"enable_prefix_caching": False}),
        ("kv_events_replay_endpoint", "x", ENDPOINT),
        ("kv_events_topic", "a\nb", ENDPOINT),
        ("kv_events_replay_endpoint", "5558", {}),
        ("kv_events_topic", "kv", {}),
        ("kv_events_token_ids", True, {}),
    ],
)
def test_settings_of_kv_events_that_do_not_fit_are_refused(
    key: str, value: object, others: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{key} = {value!r}: expected ')}"):
        EngineConfig(model_dir="m", **{key: value}, **others)  # type: ignore[arg-type]


def test_one_endpoint_is_not_used_twice() -> None:
    with pytest.raises(ConfigError, match=r"^kv_events_replay_endpoint = .*: expected another than"):
        EngineConfig(
            model_dir="m", kv_events_endpoint="5557", kv_events_replay_endpoint="tcp://127.0.0.1:5557"
        )


def test_without_an_endpoint_no_kv_events_are_published() -> None:
    assert kv_event_settings(EngineConfig(model_dir="m")) is None
