"""Who takes part: engines, the types of their weights and KV caches, and their options."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from naiad.errors import StartupError

# Their Python bindings can add a request to running ones.
_SERVING_ADAPTERS = ("naiad", "vllm", "openvino")
_KV_BYTES = {"float32": 4.0, "bfloat16": 2.0}
# Blocks of 32 weights.
_GGUF_BYTES = {"BF16": 2.0, "Q4_0": 18 / 32, "Q4_1": 20 / 32, "Q8_0": 34 / 32}
# Naiad's groups of 32: with a zero point in eight bits, or a minimum in 16.
_INT4_BYTES = {"gguf-Q4_0": 4.75 / 8, "gguf-Q4_1": 5 / 8, "compressed-4": 4.75 / 8}


@dataclass(frozen=True, slots=True)
class Contestant:
    """An engine with its options.

    Attributes:
        name: in tables.
        environment: a key of `environments.ENVIRONMENTS`; "": this interpreter's.
        adapter: the file `adapters/run_ADAPTER.py`.
        model_format: a format of `models.prepare`.
        group: contestants of the same group are compared: "16-bit" (float32 too), "8-bit" or "8-bit, u8 KV";
            of `formats`, what they all load.
        weight_bytes, kv_bytes: of one weight and one number of the KV cache, as the engine keeps them.
        options: of the adapter.
        head_bytes: of one weight of the head; None: `weight_bytes`.
    """

    name: str
    environment: str
    adapter: str
    model_format: str
    group: str
    weight_bytes: float
    kv_bytes: float
    options: Mapping[str, Any] = field(hash=False)
    head_bytes: float | None = None

    @property
    def is_peer(self) -> bool:
        """Whether it is another project's engine."""
        return self.environment != ""

    @property
    def serves(self) -> bool:
        """Whether it can begin a request while others run."""
        return self.adapter in _SERVING_ADAPTERS

    @property
    def product_bits(self) -> int:
        """Bits of the numbers that it can multiply at most: 32, 16 or 8."""
        if self.weight_bytes < 2:
            return 8
        return 32 if self.options.get("dtype") == "float32" else 16

    @property
    def least_agreement(self) -> float:
        """The share of the first tokens that must be float32's for its speed to be reported."""
        return 0.2 if self.weight_bytes < 2 else 0.5


def peers(cpu_flags: Collection[str]) -> list[Contestant]:
    """All engines but Naiad.

    Args:
        cpu_flags: the CPU's instruction sets as in /proc/cpuinfo. llama.cpp's buffers for AMX are left out,
            because they have crashed with 8-bit weights; OpenVINO computes in float32 without bfloat16.
    """
    extra = "amx_tile" not in cpu_flags
    precision = "bf16" if "avx512_bf16" in cpu_flags or "amx_bf16" in cpu_flags else "f32"
    kv, kv_bytes = ("bf16", 2.0) if precision == "bf16" else ("f16", 2.0)
    plain = {"precision": precision, "kv": kv, "max_num_batched_tokens": 2048}
    eight = "8-bit, u8 KV"
    return [
        Contestant("vllm eager", "vllm", "vllm", "checkpoint", "16-bit", 2, 2, {"eager": True}),
        Contestant("vllm compiled", "vllm", "vllm", "checkpoint", "16-bit", 2, 2, {"eager": False}),
        _llama("llama.cpp bf16", "gguf-BF16", "16-bit", "f16", extra),
        _llama("llama.cpp q8_0", "gguf-Q8_0", "8-bit", "f16", extra),
        _llama("llama.cpp q8_0 kv8", "gguf-Q8_0", eight, "q8_0", extra),
        _openvino("openvino 16-bit", "openvino-fp16", "16-bit", kv_bytes, plain),
        _openvino("openvino int8", "openvino-int8", "8-bit", kv_bytes, plain),
        _openvino("openvino int8 kv8", "openvino-int8", eight, 1, plain | {"kv": "u8"}),
        Contestant(
            *("transformers bf16", "transformers", "transformers", "checkpoint", "16-bit", 2, 2),
            {"dtype": "bfloat16"},
        ),
    ]


def formats(cpu_flags: Collection[str]) -> list[Contestant]:
    """Engines that load the same quantised file or checkpoint; `cpu_flags` as for `peers`.

    llama.cpp takes part twice where it has buffers in another order of a type: with and without them.
    """
    extra = "amx_tile" not in cpu_flags
    found: list[Contestant] = []
    for kind in ("Q4_0", "Q4_1", "Q8_0"):
        name, model_format = kind.lower(), f"gguf-{kind}"
        found.append(_naiad_format(name, model_format, kind, "int8" if kind == "Q8_0" else "int4"))
        found.append(_llama(f"llama.cpp {name}", model_format, kind, "f16", extra=False))
        if extra:
            found.append(_llama(f"llama.cpp {name} reordered", model_format, kind, "f16", extra))
    for bits, group in ((4, "compressed-tensors W4A16"), (8, "compressed-tensors W8A8")):
        model_format = f"compressed-{bits}"
        found.append(_naiad_format(f"w{bits}", model_format, group, f"int{bits}"))
        for is_eager in (True, False):
            found.append(
                Contestant(
                    name=f"vllm w{bits} {'eager' if is_eager else 'compiled'}",
                    environment="vllm",
                    adapter="vllm",
                    model_format=model_format,
                    group=group,
                    # Groups of 32 with a scale in 16 bits and a zero point of four.
                    weight_bytes=1 if bits == 8 else (4 + 20 / 32) / 8,
                    kv_bytes=2,
                    options={"eager": is_eager},
                    head_bytes=2,
                )
            )
    return found


def exact(model_format: str) -> Contestant:
    """Naiad in float32 with exactly the weights that a quantised model stores."""
    options = {"dtype": "float32", "quantization": "none"}
    return Contestant(f"naiad f32 {model_format}", "", "naiad", model_format, "", 4, 4, options)


REFERENCE = Contestant(
    *("transformers f32", "transformers", "transformers", "checkpoint", "16-bit", 4, 4), {"dtype": "float32"}
)


def naiad(text: str) -> Contestant:
    """Parse a contestant of Naiad, `NAME:field=value,…`, with fields of `EngineConfig`.

    Raises:
        StartupError: the text has another form.
    """
    name, _, listed = text.partition(":")
    pairs = [part.partition("=") for part in listed.split(",") if part]
    if not name or any(not key or not value for key, _, value in pairs):
        raise StartupError(f"--naiad {text}: expected NAME:field=value,…, such as bf16:dtype=bfloat16")
    fields = {key: _value(value) for key, _, value in pairs}
    is_int8 = fields.get("quantization") == "int8"
    return Contestant(
        name=f"naiad {name}",
        environment="",
        adapter="naiad",
        model_format="checkpoint",
        group="8-bit" if is_int8 else "16-bit",
        # A checkpoint of 16 bits stays in 16 bits, whatever it is computed in.
        weight_bytes=1 if is_int8 else 2,
        kv_bytes=_KV_BYTES.get(str(fields.get("dtype")), 2.0),
        options=fields,
    )


def _value(text: str) -> bool | int | str:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdecimal() else text


def _naiad_format(name: str, model_format: str, group: str, quantization: str) -> Contestant:
    return Contestant(
        name=f"naiad {name}",
        environment="",
        adapter="naiad",
        model_format=model_format,
        group=group,
        weight_bytes=_INT4_BYTES.get(model_format, 1),
        kv_bytes=2,
        options={"dtype": "bfloat16", "quantization": quantization},
        # A head that has four bits in the file keeps them.
        head_bytes=None if model_format.startswith("gguf-Q4") else 1,
    )


def _llama(name: str, model_format: str, group: str, kv: str, extra: bool) -> Contestant:
    weight_bytes = _GGUF_BYTES[model_format.removeprefix("gguf-")]
    kv_bytes = _GGUF_BYTES["Q8_0"] if kv == "q8_0" else 2
    options = {"kv": kv, "extra_buffers": extra}
    return Contestant(name, "llama_cpp", "llama_cpp", model_format, group, weight_bytes, kv_bytes, options)


def _openvino(
    name: str, model_format: str, group: str, kv_bytes: float, options: Mapping[str, Any]
) -> Contestant:
    weight_bytes = 1 if model_format.endswith("int8") else 2
    return Contestant(name, "openvino", "openvino", model_format, group, weight_bytes, kv_bytes, options)
