"""How families of models write their outputs. A family is data; `call_forms` reads its calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


@dataclass(frozen=True, slots=True)
class Span:
    """A part of an output between two marks, which belong to neither neighbour."""

    begin: str
    end: str


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """How a family's models reason.

    Attributes:
        name: the family's name.
        reasoning: encloses what comes before the content.
    """

    name: str
    reasoning: Span


REASONING_FAMILIES = (
    ReasoningFamily("think", Span("<think>", "</think>")),
    ReasoningFamily("mistral", Span("[THINK]", "[/THINK]")),
)
# How to choose a family: by the checkpoint, none, or one by its name.
REASONING_CHOICES = ("auto", "none", *(family.name for family in REASONING_FAMILIES))


# Keys of an object that is a call, besides its arguments.
_KINDS_OF_KEYS = {"name": "name", "function": "name", "id": "id", "type": "type"}


class CallForm(Enum):
    """How a call, or a list of calls, is written."""

    JSON = "an object with the name and the arguments, or a list of such objects"
    NAMED = "the name, then the arguments as an object; or JSON"
    PYTHON = "a list of Python's calls, whose arguments have names and are literals"
    XML = "an element for the function, and in it an element for each argument"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallWriting:
    """How a family writes calls when a grammar holds for them; readers take more than that.

    Attributes:
        begin: the mark before the calls; if it ends with the bracket of their list, readers leave that.
        opening: what stands between the mark and the first name.
        before_arguments, after_arguments: stand around a call's arguments.
        between: stands between two calls.
        closing: what stands behind the last call.
        repeats_begin: each call has a mark, an opening and a closing of its own.
        needs: marks that the vocabulary must have.
    """

    begin: str = ""
    opening: str
    before_arguments: str
    after_arguments: str
    between: str
    closing: str = ""
    repeats_begin: bool = False
    needs: tuple[str, ...] = ()


def _written_list(begin: str, end: str = "", needs: tuple[str, ...] = ()) -> CallWriting:
    """A mark and a list of objects."""
    return CallWriting(
        begin=begin,
        opening='[{"name": "',
        before_arguments='", "arguments": ',
        after_arguments="}",
        between=', {"name": "',
        closing="]" + end,
        needs=needs,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFamily:
    """How a family's models call tools.

    Attributes:
        name: the family's name.
        form: how calls are written.
        begins: marks that begin calls, anywhere in the content.
        bare: calls that are the beginning of the content may begin with this, without a mark.
        end: the mark behind calls, which models may leave out.
        separator: stands between calls that have no marks of their own.
        inner_marks: marks inside a call.
        argument_keys: the keys of the arguments in an object; the first is that which models are taught.
        writings: the first whose needs are met is how calls are written under a grammar. Behind other marks
            than its own calls are written as the first for such a mark says, with arguments between the same.
        signs: each a group of texts; a chat template that has all texts of a group is the family's.
        has_short_ids: ids of calls have nine letters or digits, as the family's templates demand.
    """

    name: str
    form: CallForm
    begins: tuple[str, ...]
    bare: str = ""
    end: str = ""
    separator: str = ""
    inner_marks: tuple[str, ...] = ()
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    writings: tuple[CallWriting, ...]
    signs: tuple[tuple[str, ...], ...]
    has_short_ids: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks, some of which may be special tokens."""
        return tuple(mark for mark in (*self.begins, *self.inner_marks, self.end) if mark)

    def kind_of_key(self, key: str) -> str:
        """What a key of a call's object says: name, arguments, or what is passed over; "" for another key."""
        return "arguments" if key in self.argument_keys else _KINDS_OF_KEYS.get(key, "")


# In the order in which a chat template is compared with their signs.
CALL_FAMILIES = (
    CallFamily(
        name="qwen3_coder",
        form=CallForm.XML,
        begins=("<tool_call>",),
        end="</tool_call>",
        writings=(
            CallWriting(
                begin="<tool_call>",
                opening="\n<function=",
                before_arguments=">\n",
                after_arguments="</function>\n</tool_call>",
                between="\n",
                repeats_begin=True,
            ),
        ),
        signs=(("<tool_call>", "<function=", "<parameter="),),
    ),
    CallFamily(
        name="hermes",
        form=CallForm.JSON,
        begins=("<tool_call>",),
        end="</tool_call>",
        writings=(
            CallWriting(
                begin="<tool_call>",
                opening='\n{"name": "',
                before_arguments='", "arguments": ',
                after_arguments="}\n</tool_call>",
                between="\n",
                repeats_begin=True,
            ),
        ),
        signs=(("<tool_call>", "</tool_call>"),),
    ),
    CallFamily(
        name="mistral",
        form=CallForm.NAMED,
        begins=("[TOOL_CALLS]",),
        inner_marks=("[ARGS]", "[CALL_ID]"),
        writings=(
            CallWriting(
                begin="[TOOL_CALLS]",
                opening="",
                before_arguments="[ARGS]",
                after_arguments="",
                between="",
                repeats_begin=True,
                needs=("[ARGS]",),
            ),
            _written_list("[TOOL_CALLS]"),
        ),
        signs=(("[TOOL_CALLS]",),),
        has_short_ids=True,
    ),
    CallFamily(
        name="phi4_mini_json",
        form=CallForm.JSON,
        begins=("functools", "<|tool_call|>"),
        end="<|/tool_call|>",
        writings=(
            _written_list("<|tool_call|>", "<|/tool_call|>", needs=("<|tool_call|>", "<|/tool_call|>")),
            # The word alone is one of ordinary text.
            replace(_written_list("functools"), begin="functools[", opening='{"name": "'),
        ),
        signs=(("functools",), ("<|tool|>", "<|/tool|>")),
    ),
    CallFamily(
        name="granite",
        form=CallForm.JSON,
        begins=("<|tool_call|>", "<tool_call>"),
        writings=(
            _written_list("<|tool_call|>", needs=("<|tool_call|>",)),
            _written_list("<tool_call>"),
        ),
        signs=(
            ("<|tool_call|>",),
            ("<|start_of_role|>available_tools",),
            ("available_tools", "start_of_role"),
        ),
    ),
    CallFamily(
        name="pythonic",
        form=CallForm.PYTHON,
        begins=("<|python_start|>",),
        bare="[",
        end="<|python_end|>",
        writings=(
            CallWriting(opening="[", before_arguments="(", after_arguments=")", between=", ", closing="]"),
        ),
        signs=(("func_name1(",), ("<|python_start|>",)),
    ),
    CallFamily(
        name="llama3_json",
        form=CallForm.JSON,
        begins=("<|python_tag|>",),
        bare="{",
        separator=";",
        argument_keys=("parameters", "arguments"),
        writings=(
            CallWriting(
                opening='{"name": "',
                before_arguments='", "parameters": ',
                after_arguments="}",
                between="; ",
                repeats_begin=True,
            ),
        ),
        signs=(("<|python_tag|>",), ('"parameters": dictionary of argument',)),
    ),
)
# How to choose a family, as above.
CALL_CHOICES = ("auto", "none", *sorted(family.name for family in CALL_FAMILIES))


@dataclass(frozen=True, slots=True)
class FamilyChoices:
    """How the families of a checkpoint are chosen.

    Attributes:
        reasoning: one of REASONING_CHOICES.
        calls: one of CALL_CHOICES.
    """

    reasoning: str = "auto"
    calls: str = "auto"
