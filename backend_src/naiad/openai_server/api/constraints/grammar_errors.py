"""Names the client's field in errors about the grammar that was made of it."""

from __future__ import annotations

from naiad.errors import NaiadError
from naiad.frontend.field import FieldError
from naiad.frontend.fields import FIELD
from naiad.sequence import GrammarSpec

_STRUCTURED_OUTPUTS = FIELD["structured_outputs"].name
# Between the name of a format and the tools that stand in one grammar with it.
WITH_TOOLS = " with tools"


def param_of(spec: GrammarSpec) -> str:
    """The body's field of a grammar; of a format beside tools it is the format's."""
    name = spec.field.removesuffix(WITH_TOOLS)
    return _STRUCTURED_OUTPUTS if name.startswith(f"{_STRUCTURED_OUTPUTS}.") else name


def about_field(error: NaiadError, spec: GrammarSpec | None, engine_name: str = "") -> NaiadError:
    """The engine's error, as one about the client's field if it is about the request's grammar.

    Args:
        error: the engine's.
        spec: the grammar; None: the request has none.
        engine_name: the field's name at the engine; "": it is the client's.
    """
    message = str(error)
    if spec is None or not message.startswith(f"{engine_name or spec.field} "):
        return error
    message = spec.field + message.removeprefix(engine_name or spec.field)
    param = param_of(spec)
    return FieldError(param, message.removeprefix(param))
