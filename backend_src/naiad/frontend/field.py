"""`Field`: one thing that a request may carry, and the one validator of its values.

How a frontend uses it: it takes each value from where its client put it, under the name that `Field.name_at`
gives, and calls one of

- `Field.check(value)` for a scalar or a string,
- `Field.check_count(number)` for the number of entries of a list,
- `Field.check_token_ids(ids, vocab_size)` and `Field.check_numbers(values)` for the entries themselves,
- `Field.check_text(text)` for one string of a list.

Each raises a `FieldError`, whose message begins with the field's name. A frontend whose client sent the field
under another name re-raises `error.named(client_name)`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from naiad.errors import InvalidRequestError

INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1

# A field's name at a frontend: the field's own, or none, as the frontend does not have the field.
SAME = "="
ABSENT = ""

Scalar = int | float | bool


class Kind(str, enum.Enum):
    """The type of a tensor, as Triton's configuration calls it behind `TYPE_`."""

    BOOL = "BOOL"
    INT32 = "INT32"
    INT64 = "INT64"
    UINT8 = "UINT8"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    FP16 = "FP16"
    FP32 = "FP32"
    STRING = "STRING"


class Frontend(enum.Enum):
    """Where a field has a name.

    ENSEMBLE and TEXT are the models that take text, TOKENIZER and LLM the ensemble's first two steps.
    VLLM has the tensors of the vLLM backend's model, SAMPLING_PARAMETERS the keys of its JSON object.
    """

    ENSEMBLE = "ensemble"
    TEXT = "text"
    TOKENIZER = "tokenizer"
    LLM = "llm"
    VLLM = "vllm"
    SAMPLING_PARAMETERS = "sampling_parameters"


class Arrival(enum.Flag):
    """How a field may come."""

    TENSOR = enum.auto()
    PARAMETER = enum.auto()
    BOTH = TENSOR | PARAMETER


class FieldError(InvalidRequestError):
    """A field that is missing, or has a value that is not allowed.

    Attributes:
        field_name: the field's own name.
        problem: the rest of the message, such as " = 3: expected 0 … 1".
    """

    def __init__(self, field_name: str, problem: str) -> None:
        """Begin the message with the field's name."""
        super().__init__(field_name + problem)
        self.field_name = field_name
        self.problem = problem

    def named(self, client_name: str) -> FieldError:
        """Return the same error for a client that knows the field by this name."""
        return FieldError(client_name, self.problem)


@dataclass(frozen=True, slots=True)
class Field:
    """A row of the table of fields.

    Attributes:
        name: at the text level, and in messages; of a field that the text level does not have, the name at
            the frontend that has it.
        kind: of each value.
        dims: of the tensor, without the batch dimension; (1,) is a scalar, −1 any number.
        minimum, maximum: inclusive bounds of each number.
        above: exclusive lower bound; None = none.
        off: the value that changes nothing; None = none. So do smaller ones, where there is no `minimum`.
        sets: which part of the typed request it sets: "params.NAME" for an attribute of `SamplingParams`,
            "outputs.NAME" for a requested output, or the name of another part.
        alias_of: another name of that field; if both are sent they must be equal.
        repeats: a client's own parameter for that field, which wins over it.
        max_items: entries of a list at most; 0 = no bound of its own.
        max_item_size: bytes of each string, or ids of each packed word, at most; 0 = no bound of its own.
        required: a request without it is refused.
        per_request: has one value for all rows of a request.
        served: a field that is not served is refused unless it asks for nothing.
        off_values: values of a field that is not served that ask for nothing. Empty tensors and empty
            strings never ask for anything.
        single_is_off: of a field that is not served: one value a row asks for nothing.
        filters: it takes tokens away from the draw, so a request that sends it wants one.
        with_beams: with a beam search only these values are allowed, besides `off`; () = none, None = all.
        without_beams: without a beam search only these values are allowed; None = all.
        text, llm, tokenizer, vllm: its tensor's name there; SAME or ABSENT.
        text_model_only: the model `text` has it and the ensemble, which wires others' tensors, has not.
        key: its key among the vLLM backend's `sampling_parameters`; SAME or ABSENT.
        key_default: its value there when the key is not sent; None = as at the text level.
        key_off: values there that count as not sent, or of a field that is not served that ask for nothing.
        key_above: exclusive lower bound there; None = as `above`.
        arrival: None: a scalar comes as a tensor or as a parameter, a list as a tensor.
        note: a sentence of documentation; its bounds are added to it.
        notes: frontends where another sentence is needed.
    """

    name: str
    kind: Kind
    dims: tuple[int, ...] = (1,)
    minimum: float = -math.inf
    maximum: float = math.inf
    above: float | None = None
    off: Scalar | None = None
    sets: str = ""
    alias_of: str = ""
    repeats: str = ""
    max_items: int = 0
    max_item_size: int = 0
    required: bool = False
    per_request: bool = False
    served: bool = True
    off_values: tuple[Any, ...] = ()
    single_is_off: bool = False
    filters: bool = False
    with_beams: tuple[Scalar, ...] | None = None
    without_beams: tuple[Scalar, ...] | None = None
    text: str = SAME
    llm: str = SAME
    tokenizer: str = ABSENT
    vllm: str = ABSENT
    text_model_only: bool = False
    key: str = ABSENT
    key_default: Scalar | None = None
    key_off: tuple[Any, ...] = ()
    key_above: float | None = None
    arrival: Arrival | None = None
    note: str = ""
    notes: Mapping[Frontend, str] = field(default_factory=dict)

    def name_at(self, frontend: Frontend) -> str:
        """Return what the frontend calls it; "" if it does not have the field."""
        names = {
            Frontend.ENSEMBLE: ABSENT if self.text_model_only else self.text,
            Frontend.TEXT: self.text,
            Frontend.TOKENIZER: self.tokenizer,
            Frontend.LLM: self.llm,
            Frontend.VLLM: self.vllm,
            Frontend.SAMPLING_PARAMETERS: self.key,
        }
        return self.name if names[frontend] == SAME else names[frontend]

    @property
    def is_scalar(self) -> bool:
        """Whether it has one value."""
        return self.dims == (1,)

    @property
    def comes_as_parameter(self) -> bool:
        """Whether it may be a parameter of the request."""
        if self.arrival is None:
            return self.is_scalar
        return Arrival.PARAMETER in self.arrival

    @property
    def parameter_of_sampling(self) -> str:
        """The attribute of `SamplingParams` that it sets; "" = none."""
        part, _, attribute = self.sets.partition(".")
        return attribute if part == "params" else ""

    @property
    def requested_output(self) -> str:
        """The attribute of the requested outputs that it sets; "" = none."""
        part, _, attribute = self.sets.partition(".")
        return attribute if part == "outputs" else ""

    @property
    def off_includes_less(self) -> bool:
        """Whether values below `off` change nothing either."""
        return self.off is not None and self.minimum == -math.inf and self.above is None

    def is_off(self, value: Scalar) -> bool:
        """Return whether this value changes nothing."""
        return value == self.off or (self.off_includes_less and value < (self.off or 0))

    def error(self, problem: str) -> FieldError:
        """Return an error about this field; the problem follows its name."""
        return FieldError(self.name, problem)

    def check(self, value: Any) -> Any:
        """Return a scalar's value in the type of its kind, or a string.

        Raises:
            FieldError: it has another type, or is outside of the bounds.
        """
        if self.kind is Kind.STRING:
            return self._checked_string(value)
        if self.kind is Kind.BOOL:
            if isinstance(value, bool):
                return value
            raise self.error(f" = {shown(value)}: expected true or false")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(f" = {shown(value)}: expected a number")
        return self._checked_number(value)

    def check_count(self, count: int, noun: str) -> None:
        """Refuse a list of more entries than are allowed.

        Args:
            count: its entries.
            noun: what messages call them, such as "ids".

        Raises:
            FieldError: names both numbers.
        """
        if count > self.max_items:
            raise self.error(f" has {count} {noun}: at most {self.max_items} are allowed")

    def check_token_ids(self, ids: Sequence[int], vocab_size: int) -> None:
        """Refuse ids outside of the vocabulary.

        Raises:
            FieldError: names the first of them.
        """
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            bad = next(each for each in ids if not 0 <= each < vocab_size)
            raise self.error(f" holds {bad}: expected token ids in [0, {vocab_size})")

    def check_numbers(self, values: Sequence[float]) -> None:
        """Refuse entries that are not finite, or outside of the bounds.

        Raises:
            FieldError: names the first of them.
        """
        for value in values:
            if not self.minimum <= value <= self.maximum:
                expected = f"expected finite numbers in [{self.minimum}, {self.maximum}]"
                raise self.error(f" holds {value}: {expected}")

    def check_text(self, text: str) -> None:
        """Refuse one string of a list that is too long.

        Raises:
            FieldError: names its bytes, or it is no valid Unicode.
        """
        num_bytes = self.num_bytes(text)
        if num_bytes > self.max_item_size:
            raise self.error(f" has an entry of {num_bytes} bytes: at most {self.max_item_size} are allowed")

    def num_bytes(self, text: str) -> int:
        """Return the length of a string in UTF-8.

        Raises:
            FieldError: it is no valid Unicode (a parameter may hold half a surrogate pair).
        """
        try:
            return len(text.encode())
        except UnicodeEncodeError:
            raise self.error(" holds half a surrogate pair: expected valid Unicode") from None

    def decoded(self, raw: bytes) -> str:
        """Return the text of a string tensor's value.

        Raises:
            FieldError: it is not valid UTF-8.
        """
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f" is not valid UTF-8 (byte {error.start})") from None

    def asks_for_nothing(self, value: Any) -> bool:
        """Return whether a value of a field that is not served asks for nothing.

        Args:
            value: an array [rows, …], or a parameter's plain value.
        """
        if self.single_is_off and np.shape(value)[1:] == (1,):
            return True
        flat = np.asarray(value).reshape(-1)
        if flat.dtype.kind in "OSU":
            return all(item in (b"", "") for item in flat.tolist())
        return all(item in self.off_values for item in flat.tolist())

    def _checked_string(self, value: Any) -> str:
        if not isinstance(value, str):
            raise self.error(f" = {shown(value)}: expected a string")
        num_bytes = self.num_bytes(value)
        if self.max_item_size and num_bytes > self.max_item_size:
            raise self.error(f" has {num_bytes} bytes: at most {self.max_item_size} are allowed")
        return value

    def _checked_number(self, value: float) -> Scalar:
        is_float = self.kind is Kind.FP32
        if not is_float and not isinstance(value, int):
            raise self.error(f" = {shown(value)}: expected a whole number")
        if is_float:
            value = self._bound_meant(value)
        is_above = self.above is None or value > self.above
        if not is_above or not self.minimum <= value <= self.maximum or not math.isfinite(value):
            raise self.error(f" = {shown(value)}: expected {self._bounds()}")
        return float(value) if is_float else int(value)

    def _bound_meant(self, value: float) -> float:
        """The bound, for its nearest float32: an FP32 tensor can not hold it better."""
        for bound in (self.minimum, self.maximum):
            if value == float(np.float32(bound)):
                return bound
        return value

    def _bounds(self) -> str:
        parts = [
            "" if self.minimum == -math.inf else f" ≥ {self.minimum}",
            "" if self.above is None else f" > {self.above}",
            "" if self.maximum == math.inf else f" ≤ {self.maximum}",
        ]
        return "a finite number" + " and".join(part for part in parts if part)


def shown(value: Any) -> str:
    """Return a client's value as messages show it."""
    return repr(value)[:80]
