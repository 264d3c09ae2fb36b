"""`Field`: a field of a request, with the only validator of its values.

A frontend takes each value from its client's request, by the name that `Field.name_at` returns, and calls
one of

- `Field.check(value)` for a scalar or a string,
- `Field.check_count(number)` for the number of entries of a list,
- `Field.check_token_ids(ids, vocab_size)` and `Field.check_numbers(values)` for the entries themselves,
- `Field.check_text(text)` for one string of a list.

Each raises a `FieldError` whose message begins with the field's name. If the client sent the field under
another name, the frontend re-raises `error.named(client_name)`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from naiad.errors import InvalidRequestError

INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1
_MAX_SHOWN = 80

# A field's name at a frontend: the field's own name, or none because the frontend does not have the field.
SAME = "="
ABSENT = ""

Scalar = int | float | bool


class Kind(str, enum.Enum):
    """The type of a tensor, as in Triton's configuration after `TYPE_`."""

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
    """A frontend, or a part of one, that has its own names for fields.

    ENSEMBLE and TEXT are the models that take text, TOKENIZER and LLM the ensemble's first two steps.
    VLLM has the tensors of the vLLM backend's model, SAMPLING_PARAMETERS the keys of its JSON object. OPENAI
    has the keys of an OpenAI client's JSON object.
    """

    ENSEMBLE = "ensemble"
    TEXT = "text"
    TOKENIZER = "tokenizer"
    LLM = "llm"
    VLLM = "vllm"
    SAMPLING_PARAMETERS = "sampling_parameters"
    OPENAI = "openai"


class Arrival(enum.Flag):
    """How a field may be sent."""

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
        """Return the same error with the name under which the client sent the field."""
        return FieldError(client_name, self.problem)


@dataclass(frozen=True, slots=True)
class Field:
    """A row of the table of fields.

    Attributes:
        name: the field's name at the text level and in messages; if the text level does not have the field,
            its name at the frontend that has it.
        kind: the type of each value.
        dims: dimensions of the tensor, without the batch dimension; (1,) is a scalar, −1 any number.
        minimum, maximum: inclusive bounds of each number.
        above: exclusive lower bound; None = none.
        off: the value that has no effect; None = none. Smaller values have no effect either if there is no
            `minimum`.
        sets: which part of the typed request it sets: "params.NAME" for an attribute of `SamplingParams`,
            "outputs.NAME" for a requested output, or the name of another part.
        alias_of: the field of which this is another name; if both are sent they must be equal.
        repeats: the field that this parameter duplicates; if both are sent, that field wins.
        max_items: maximum number of entries of a list; 0 = not limited here.
        max_item_size: maximum number of bytes of each string, or of ids of each packed word; 0 = not limited
            here.
        required: whether a request without the field is refused.
        per_request: whether all rows of a request must have the same value.
        served: whether the field is supported; otherwise it is refused unless its value asks for nothing.
        off_values: values of an unserved field that ask for nothing. Empty tensors and empty strings never
            ask for anything.
        single_is_off: whether a single value in each row of an unserved field asks for nothing.
        filters: whether the field restricts the tokens that may be drawn, so that sending it means sampling.
        with_beams: the only values allowed with beam search, besides `off`; () = none, None = all.
        without_beams: the only values allowed without beam search; None = all.
        text, llm, tokenizer, vllm: the name of its tensor at this frontend; may be SAME or ABSENT.
        text_model_only: whether the model `text` has the field, but not the ensemble.
        key: its key among the vLLM backend's `sampling_parameters`; may be SAME or ABSENT.
        key_default: the value if the key is not sent; None = as at the text level.
        key_off: values of the key that count as not sent or, for an unserved field, ask for nothing.
        key_above: exclusive lower bound of the key's value; None = as `above`.
        openai: its key in an OpenAI client's JSON object; may be SAME or ABSENT. `key_off` and `key_above`
            hold for it as well.
        arrival: how the field may be sent; None: a scalar as a tensor or as a parameter, a list as a tensor.
        note: a sentence for the documentation, which adds the bounds to it.
        notes: sentences that replace `note` at certain frontends.
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
    openai: str = ABSENT
    arrival: Arrival | None = None
    note: str = ""
    notes: Mapping[Frontend, str] = field(default_factory=dict)

    def name_at(self, frontend: Frontend) -> str:
        """Return the field's name at this frontend; "" if the frontend does not have the field."""
        names = {
            Frontend.ENSEMBLE: ABSENT if self.text_model_only else self.text,
            Frontend.TEXT: self.text,
            Frontend.TOKENIZER: self.tokenizer,
            Frontend.LLM: self.llm,
            Frontend.VLLM: self.vllm,
            Frontend.SAMPLING_PARAMETERS: self.key,
            Frontend.OPENAI: self.openai,
        }
        return self.name if names[frontend] == SAME else names[frontend]

    @property
    def is_scalar(self) -> bool:
        """Whether the field has a single value."""
        return self.dims == (1,)

    @property
    def comes_as_parameter(self) -> bool:
        """Whether the field may be sent as a parameter of the request."""
        if self.arrival is None:
            return self.is_scalar
        return Arrival.PARAMETER in self.arrival

    @property
    def parameter_of_sampling(self) -> str:
        """The attribute of `SamplingParams` that the field sets; "" = none."""
        part, _, attribute = self.sets.partition(".")
        return attribute if part == "params" else ""

    @property
    def requested_output(self) -> str:
        """The attribute of the requested outputs that the field sets; "" = none."""
        part, _, attribute = self.sets.partition(".")
        return attribute if part == "outputs" else ""

    @property
    def off_includes_less(self) -> bool:
        """Whether values below `off` have no effect either."""
        return self.off is not None and self.minimum == -math.inf and self.above is None

    def is_off(self, value: Scalar) -> bool:
        """Return whether this value has no effect."""
        return value == self.off or (self.off_includes_less and value < (self.off or 0))

    def error(self, problem: str) -> FieldError:
        """Return an error about this field, whose message is the field's name followed by `problem`."""
        return FieldError(self.name, problem)

    def check(self, value: Any) -> Any:
        """Check the value of a scalar or a string; return it in the type of the field's kind.

        Raises:
            FieldError: the value has the wrong type or is out of bounds.
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
        """Check the number of entries of a list.

        Args:
            count: number of entries.
            noun: the word for the entries in the message, such as "ids".

        Raises:
            FieldError: there are too many; the message names the number and the maximum.
        """
        if count > self.max_items:
            raise self.error(f" has {count} {noun}: at most {self.max_items} are allowed")

    def check_token_ids(self, ids: Sequence[int], vocab_size: int) -> None:
        """Check that all ids are in the vocabulary.

        Raises:
            FieldError: an entry is not allowed; the message names the first such entry.
        """
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            bad = next(each for each in ids if not 0 <= each < vocab_size)
            raise self.error(f" holds {bad}: expected token ids in [0, {vocab_size})")

    def check_numbers(self, values: Sequence[float]) -> None:
        """Check that all entries are finite and within the bounds.

        Raises:
            FieldError: an entry is not allowed; the message names the first such entry.
        """
        for value in values:
            if not self.minimum <= value <= self.maximum:
                expected = f"expected finite numbers in [{self.minimum}, {self.maximum}]"
                raise self.error(f" holds {value}: {expected}")

    def check_text(self, text: str) -> None:
        """Check the length of one string of a list.

        Raises:
            FieldError: the string is too long or not valid Unicode; the message names its length in bytes.
        """
        num_bytes = self.num_bytes(text)
        if num_bytes > self.max_item_size:
            raise self.error(f" has an entry of {num_bytes} bytes: at most {self.max_item_size} are allowed")

    def num_bytes(self, text: str) -> int:
        """Return the length of a string in bytes of UTF-8.

        Raises:
            FieldError: the string is not valid Unicode (a parameter may hold half a surrogate pair).
        """
        try:
            return len(text.encode())
        except UnicodeEncodeError:
            raise self.error(" holds half a surrogate pair: expected valid Unicode") from None

    def decoded(self, raw: bytes) -> str:
        """Decode a value of a string tensor.

        Raises:
            FieldError: the value is not valid UTF-8.
        """
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f" is not valid UTF-8 (byte {error.start})") from None

    def asks_for_nothing(self, value: Any) -> bool:
        """Return whether the value of an unserved field asks for nothing.

        Args:
            value: an array [rows, …], or the plain value of a parameter.
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
        """Return the bound if the value is the float32 nearest to it: FP32 tensors are no more exact."""
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
    """Return a client's value for use in a message, shortened if it is long.

    The time that this takes does not depend on the value's size.
    """
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) >= _MAX_SHOWN:
            break
    return text[:_MAX_SHOWN]


def _pieces(value: Any) -> Iterator[str]:
    """Yield the representation of a value piece by piece, no piece longer than what is shown needs."""
    if type(value) is list:
        yield "["
        for index, each in enumerate(value):
            yield ", " if index else ""
            yield from _pieces(each)
        yield "]"
    elif type(value) is dict:
        yield "{"
        for index, (key, each) in enumerate(value.items()):
            yield ", " if index else ""
            yield from _pieces(key)
            yield ": "
            yield from _pieces(each)
        yield "}"
    else:
        yield repr(value[:_MAX_SHOWN] if isinstance(value, str | bytes) else value)
