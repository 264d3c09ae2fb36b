"""Writes a forward pass down as a tape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from naiad_kernels.array_check import check_array
from naiad_kernels.linear import LinearWeight
from naiad_kernels.native.kv_layout import GROUP_TOKENS
from naiad_kernels.native.library import Activation, Cache, Element, Kind, Record
from naiad_kernels.native.panels import PANEL_OUTPUTS, NativeWeight, padded
from naiad_kernels.recording import NotRecordableError, Traced
from naiad_kernels.rotary_store_kv import HeadNorm
from naiad_kernels.store_kv import LayerCache

_NO_BUFFER = -1
_ELEMENTS = {
    torch.float32: Element.FLOAT32,
    torch.bfloat16: Element.BFLOAT16,
    torch.float16: Element.FLOAT16,
}


def read_values(record: Record) -> list[int]:
    """The values that a record reads."""
    read = [] if record.kind in (Kind.EMBED, Kind.ANGLES) else [record.in_]
    has_other = record.kind in (Kind.ADD, Kind.ROTARY_STORE)
    if has_other or (record.kind == Kind.LINEAR and record.other != _NO_BUFFER):
        read.append(record.other)
    return read


class TracedRows(Traced):
    """Stands in for `[num_tokens, width]`, or for the heads of it.

    Attributes:
        value: number of the value that it stands for.
        width: of a row.
    """

    def __init__(self, recorder: TapeRecorder, value: int, width: int) -> None:
        """Stand in for a value of the recorder's."""
        super().__init__(recorder)
        self.value = value
        self.width = width

    def view(self, *sizes: int) -> TracedRows:
        """The row's heads: `[num_tokens, num_heads, head_dim]`."""
        if len(sizes) != 3 or sizes[0] != -1 or sizes[1] * sizes[2] != self.width:
            raise NotRecordableError(f"Tensor.view{sizes} has no record")
        return self

    def float(self) -> TracedRows:
        """It is float32 already."""
        return self


class TracedInput(Traced):
    """Stands in for a step's token ids or positions."""

    def __init__(self, recorder: TapeRecorder, name: str) -> None:
        """Stand in for the input of that name."""
        super().__init__(recorder)
        self.name = name


@dataclass(frozen=True, slots=True)
class TracedGroup:
    """Stands in for the slots and the attention plan of a group of layers.

    Attributes:
        index: of the group.
        window: 0, or how many tokens each token attends to at most.
    """

    index: int
    window: int


@dataclass(frozen=True, slots=True)
class Recording:
    """A forward pass as records.

    Attributes:
        records: in their order; `in_`, `other` and `out` are numbers of values.
        widths: of each value.
        inputs: values that the caller writes.
        output: the value that the caller reads.
        kept: tensors that records point into.
    """

    records: list[Record]
    widths: list[int]
    inputs: list[int]
    output: int
    kept: list[torch.Tensor]


class TapeRecorder:
    """Has a method for each op that has a record; the method's name is the op's."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        """Have written nothing.

        Args:
            dtype: as which keys and values of an int8 cache are multiplied, float32 or bfloat16.
        """
        self._dtype = dtype
        self._records: list[Record] = []
        self._widths: list[int] = []
        self._inputs: list[int] = []
        self._kept: list[torch.Tensor] = []

    def token_ids(self) -> TracedInput:
        """Stand in for a step's token ids."""
        return TracedInput(self, "token_ids")

    def positions(self) -> TracedInput:
        """Stand in for a step's positions."""
        return TracedInput(self, "positions")

    def rows(self, width: int) -> TracedRows:
        """Stand in for rows that the caller writes."""
        rows = self._new_value(width)
        self._inputs.append(rows.value)
        return rows

    def finish(self, output: TracedRows) -> Recording:
        """What was written, with the value that the caller reads.

        Raises:
            NotRecordableError: a value is read that only existed inside a record.
        """
        known = set(self._inputs)
        for record in self._records:
            if not known.issuperset(read_values(record)):
                raise NotRecordableError("the sums of a gated product are read again, which has no record")
            known.add(record.out)
        if output.value not in known:
            raise NotRecordableError("the sums of a gated product are the result, which has no record")
        return Recording(self._records, self._widths, self._inputs, output.value, self._kept)

    def record(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Write one call down.

        Raises:
            NotRecordableError: the op has no record.
        """
        method: Callable[..., Any] | None = getattr(self, f"_{op}", None)
        if method is None:
            raise NotRecordableError(f"{op} has no record")
        return method(*args, **kwargs)

    # ---- the ops -----------------------------------------------------------------------------------

    def _embedding(self, token_ids: TracedInput, table: torch.Tensor, factor: float = 1.0) -> TracedRows:
        assert token_ids.name == "token_ids"
        num_rows, width = table.shape
        return self._write(
            Record(
                kind=Kind.EMBED,
                table=self._pointer("table", table),
                element=_ELEMENTS[table.dtype],
                num_rows=num_rows,
                factor=factor,
            ),
            width,
        )

    def _rms_norm(self, x: TracedRows, weight: torch.Tensor, eps: float) -> TracedRows:
        _expect("weight's shape", tuple(weight.shape), (x.width,))
        whole = torch.zeros(padded(x.width))
        whole[: x.width] = weight
        record = Record(kind=Kind.RMS_NORM, in_=x.value, weight=self._pointer("weight", whole), eps=eps)
        return self._write(record, x.width)

    def _add_rms_norm(
        self, x: TracedRows, residual: TracedRows, weight: torch.Tensor, eps: float
    ) -> tuple[TracedRows, TracedRows]:
        _expect("residual's width", residual.width, x.width)
        total = self._write(Record(kind=Kind.ADD, in_=x.value, other=residual.value), x.width)
        return self._rms_norm(total, weight, eps), total

    def _linear(self, x: TracedRows, weight: LinearWeight, residual: TracedRows | None = None) -> TracedRows:
        if not isinstance(weight, NativeWeight):
            raise NotRecordableError(f"linear by {type(weight).__name__} has no record")
        _expect("x's width", x.width, weight.in_features)
        if residual is not None:
            _expect("residual's width", residual.width, weight.out_features)
        # Native code believes what the record says.
        weight.check()
        self._kept += [each for each in (weight.panels, weight.bias, weight.scales) if each is not None]
        other = _NO_BUFFER if residual is None else residual.value
        record = Record(kind=Kind.LINEAR, in_=x.value, other=other, matrix=weight.as_matrix())
        return self._write(record, weight.out_features)

    def _silu_and_mul(self, gate_up: TracedRows) -> TracedRows:
        return self._gate(gate_up, Activation.SILU)

    def _gelu_and_mul(self, gate_up: TracedRows, approximate: str) -> TracedRows:
        return self._gate(gate_up, Activation.GELU_TANH if approximate == "tanh" else Activation.GELU_ERF)

    def _gate(self, gate_up: TracedRows, activation: Activation) -> TracedRows:
        width = gate_up.width // 2
        last = self._records[-1] if self._records else None
        if last is not None and self._gates_itself(last, gate_up, width):
            last.activation = activation
            last.width = width
            # The sums are never written: whoever reads them too is refused.
            gated = self._new_value(width)
            last.out = gated.value
            return gated
        record = Record(kind=Kind.GATE, in_=gate_up.value, activation=activation)
        return self._write(record, width)

    def _best_tokens(self, logits: TracedRows) -> None:
        # It writes what the tape's caller hands in, and leaves its input as it is.
        record = Record(kind=Kind.BEST_TOKENS, in_=logits.value, out=logits.value, width=logits.width)
        self._records.append(record)

    def _draw_tokens(self, logits: TracedRows, best: None, draws: None) -> None:
        assert self._records, "nothing finds the best tokens"
        found = self._records[-1]
        assert found.kind == Kind.BEST_TOKENS, found.kind
        assert found.in_ == logits.value, (found.in_, logits.value)
        record = Record(kind=Kind.DRAW_TOKENS, in_=logits.value, out=logits.value, width=logits.width)
        self._records.append(record)

    def _soft_cap(self, x: TracedRows, cap: float) -> TracedRows:
        return self._write(Record(kind=Kind.SOFT_CAP, in_=x.value, factor=cap), x.width)

    def _rotary_angles(
        self, positions: TracedInput, inv_freq: torch.Tensor, dtype: torch.dtype
    ) -> tuple[TracedRows, TracedRows]:
        assert positions.name == "positions"
        width = 2 * len(inv_freq)
        record = Record(kind=Kind.ANGLES, frequencies=self._pointer("inv_freq", inv_freq.float()))
        rows = self._write(record, width)
        return rows, rows

    def _rotary_store_kv(
        self,
        heads: TracedRows,
        angles: tuple[TracedRows, TracedRows],
        norm: HeadNorm | None,
        cache: LayerCache,
        slots: TracedGroup,
    ) -> TracedRows:
        laid_out = self._cache(cache)
        num_kv_heads, head_dim = laid_out.num_kv_heads, laid_out.head_dim
        num_heads = heads.width // head_dim - 2 * num_kv_heads
        _expect("angles' width", angles[0].width, head_dim)
        least = (2 * num_kv_heads + 1) * head_dim
        if heads.width < least or heads.width % head_dim:
            allowed = f"{least} or more, a multiple of {head_dim}"
            raise ValueError(f"heads' width is {heads.width}; allowed: {allowed}")
        if norm is not None:
            _expect("norm.weight's shape", tuple(norm.weight.shape), (num_heads + num_kv_heads, head_dim))
        record = Record(
            kind=Kind.ROTARY_STORE,
            in_=heads.value,
            other=angles[0].value,
            group=slots.index,
            num_heads=num_heads,
            cache=laid_out,
        )
        if norm is not None:
            record.weight = self._pointer("norm.weight", norm.weight.float())
            record.eps = norm.eps
        return self._write(record, num_heads * head_dim)

    def _paged_attention(
        self,
        query: TracedRows,
        cache: LayerCache,
        plan: TracedGroup,
        scale: float | None = None,
        soft_cap: float = 0.0,
    ) -> TracedRows:
        laid_out = self._cache(cache)
        head_dim = laid_out.head_dim
        _expect_multiple("query's width", query.width, laid_out.num_kv_heads * head_dim)
        if plan.window < 0:
            raise ValueError(f"plan.window is {plan.window}; allowed: 0 or more")
        factor = float(head_dim**-0.5) if scale is None else scale
        if not factor > 0:
            raise NotRecordableError(f"paged_attention with a scale of {factor}, not above 0, has no record")
        record = Record(
            kind=Kind.ATTENTION,
            in_=query.value,
            group=plan.index,
            num_heads=query.width // head_dim,
            factor=factor,
            soft_cap=soft_cap,
            window=plan.window,
            cache=laid_out,
        )
        return self._write(record, query.width)

    @staticmethod
    def _gates_itself(last: Record, gate_up: TracedRows, width: int) -> bool:
        """Whether the last record is the product of both halves and can gate its own sums."""
        is_product = last.kind == Kind.LINEAR and last.out == gate_up.value
        return is_product and last.other == _NO_BUFFER and not last.activation and width % PANEL_OUTPUTS == 0

    # ---- what they share ---------------------------------------------------------------------------

    def _write(self, record: Record, width: int) -> TracedRows:
        rows = self._new_value(width)
        record.out = rows.value
        record.width = width
        self._records.append(record)
        return rows

    def _new_value(self, width: int) -> TracedRows:
        self._widths.append(width)
        return TracedRows(self, len(self._widths) - 1, width)

    def _pointer(self, name: str, tensor: torch.Tensor) -> int:
        check_array(name, tensor, tensor.dtype, tensor.shape)
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _cache(self, cache: LayerCache) -> Cache:
        dtype = self._dtype if cache.is_quantized else cache.key.dtype
        cache.check(dtype)
        if cache.is_quantized and cache.key.dtype != torch.int8:
            raise NotRecordableError(f"a KV cache in {cache.key.dtype} has no record")
        num_blocks, num_kv_heads, block_size, head_dim = cache.key.shape
        _expect_multiple("block_size", block_size, GROUP_TOKENS)
        _expect_multiple("head_dim", head_dim, 2)
        return Cache(
            keys=self._pointer("cache.key", cache.key),
            values=self._pointer("cache.value", cache.value),
            key_scales=None if cache.key_scale is None else self._pointer("cache.key_scale", cache.key_scale),
            value_scales=None
            if cache.value_scale is None
            else self._pointer("cache.value_scale", cache.value_scale),
            num_blocks=num_blocks,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            head_dim=head_dim,
            element=_ELEMENTS[dtype],
        )


def _expect(name: str, value: object, allowed: object) -> None:
    """Refuse what native code, which believes records, would read past its end."""
    if value != allowed:
        raise ValueError(f"{name} is {value}; allowed: {allowed}")


def _expect_multiple(name: str, value: int, factor: int) -> None:
    if value < factor or value % factor:
        raise ValueError(f"{name} is {value}; allowed: a multiple of {factor}")
