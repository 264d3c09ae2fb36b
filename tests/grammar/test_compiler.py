from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from llguidance import LLTokenizer

from helpers.grammars import EOS_IDS, SPECS, VOCAB_SIZE, ids_with_special, schema
from helpers.tiny_tokenizers import byte_level_tokenizer, write_tokenizer
from naiad.engine_process import ClientTimings
from naiad.errors import InvalidRequestError
from naiad.grammar import Grammars, limits
from naiad.grammar.compiling import compile_text
from naiad.grammar.matcher import MaskFiller, readable
from naiad.grammar.vocabulary import Tokens
from naiad.sequence import GrammarKind, GrammarSpec

JSON = GrammarKind.JSON_SCHEMA


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), byte_level_tokenizer())


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Iterator[Grammars]:
    with closing(Grammars(folder, VOCAB_SIZE, EOS_IDS)) as made:
        yield made


def accepts(grammars: Grammars, spec: GrammarSpec, text: str, special: bool = False) -> bool:
    matcher = grammars.get(spec).matcher()
    matcher.advance(ids_with_special(grammars, text) if special else grammars.tokenizer.tokenize_str(text))
    return matcher.is_complete


TEXTS: list[tuple[GrammarKind, str, list[str], list[str]]] = [
    (GrammarKind.REGEX, "a+b", ["ab", "aaab"], ["a", "abc", "xab", ""]),
    (GrammarKind.REGEX, "^a/b$", ["a/b"], ["a\\/b"]),
    (GrammarKind.REGEX, r"a\/\\\.", ["a/\\."], ["a/\\x"]),
    (GrammarKind.REGEX, "(a+)+$", ["aaa"], ["aab"]),
    (GrammarKind.REGEX, "a\nb", ["a\nb"], ["anb"]),
    (GrammarKind.REGEX, "", [""], ["a"]),
    (GrammarKind.CHOICE, '["yes", "yes/no", "\\"é\\"\\n", ""]', ["yes", "yes/no", '"é"\n', ""], ["no", "ye"]),
    (GrammarKind.EBNF, "root ::= [0-9]+ foo-Bar?\nfoo-Bar ::= \"x\"", ["12", "1x"], ["x", "1xx"]),
    (GrammarKind.EBNF, "start: /[0-9]/", ["1"], ["12"]),
    (GrammarKind.LARK, 'start: "a" %json {"type": "boolean"}', ["atrue", "afalse"], ["a", "anull"]),
    (GrammarKind.JSON_OBJECT, "", ["{}", '{"a": [1, {"b": null}]}'], ["[]", '{"a":1}', '{ "a": 1}', "1"]),
    (JSON, "true", ["1", "[]", '"x"'], [""]),
    (JSON, '{"type": "integer", "minimum": 3, "maximum": 12}', ["3", "12"], ["2", "13", "3.5"]),
    (JSON, '{"enum": ["a", 1e2]}', ['"a"'], ['"b"']),
    (JSON, '{"type": "string", "pattern": "^a+$", "maxLength": 2}', ['"a"', '"aa"'], ['"aaa"', '"b"', "a"]),
    (JSON, '{"type": "integer", "minimum": 9007199254740991, "maximum": 9007199254740992}',
     ["9007199254740991", "9007199254740992"], ["9007199254740990", "9007199254740993"]),
    (JSON, '{"type": "integer", "maximum": 9223372036854775807}',
     ["9223372036854775807", "-9223372036854775809"], ["9223372036854775808"]),
    (JSON, '{"type": ["integer", "null"], "maximum": 9223372036854775807}',
     ["9223372036854775807", "null"], ["9223372036854775808", "1.5"]),
    (JSON, '{"enum": [-9007199254740992, [9007199254740992], true, 1e22]}',
     ["-9007199254740992", "[9007199254740992]", "true", "10000000000000000000000"], ["-9007199254740991"]),
    (JSON, '{"const": 5, "default": 18446744073709551617, "examples": [18446744073709551617]}', ["5"], ["6"]),
    (JSON, '{"minProperties": 2, "required": ["a", "b"], "properties": {"a": {}}, "type": "object"}',
     ['{"a": 1, "b": 1}'], ['{"a": 1}', '{"a": 1, "a": 1}']),
    (JSON, '{"type": "object", "minProperties": 1, "maxProperties": 2}', ['{"b": 1}', '{"b": 1, "c": 2}'],
     ["{}", '{"b": 1, "c": 2, "d": 3}']),
    (JSON, '{"type": "string", "minProperties": 5, "maxLength": 1}', ['"a"'], ["{}"]),
    (JSON, r'{"type": "string", "pattern": "^\\\\d\\d$", "default": 18446744073709551617}',
     [r'"\\d7"'], [r'"77"', r'"\\d٢"']),
    (JSON, r'{"type": "string", "pattern": "^[\\d-]\\w[^\\d\\s]\\D\\W$"}', ['"7_aé "', '"-3-é٢"'],
     ['"٢_aé "', '"7éaé "', '"77a7 "', '"77aaa"']),
    (JSON, r'{"patternProperties": {"^\\d$": {"const": 1}}, "additionalProperties": false, "type": "object"}',
     ['{"7": 1}'], ['{"٢": 1}']),
    (JSON, '{"title": "T", "description": "d", "default": 1, "$comment": "", "const": 5}', ["5"], ["6"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "source", "good", "bad"), TEXTS)
def test_a_text_is_complete_if_the_whole_of_it_follows_the_grammar(
    grammars: Grammars, kind: GrammarKind, source: str, good: list[str], bad: list[str]
) -> None:
    spec = GrammarSpec(kind=kind, source=source)
    assert [text for text in good if not accepts(grammars, spec, text)] == []
    assert [text for text in bad if accepts(grammars, spec, text)] == []


@pytest.mark.parametrize("kind", [each for each in GrammarKind if each is not GrammarKind.STRUCTURAL_TAG])
@pytest.mark.parametrize("marker", ["END", "<|im_start|>", "</r> é*"])
def test_a_grammar_may_begin_after_a_text(grammars: Grammars, kind: GrammarKind, marker: str) -> None:
    sources = {
        GrammarKind.JSON_SCHEMA: ('{"const": 1}', "1"),
        GrammarKind.JSON_OBJECT: ("", '{"a": 1}'),
        GrammarKind.REGEX: ("a+/", "aa/"),
        GrammarKind.CHOICE: ('["x", "y"]', "y"),
        GrammarKind.EBNF: ('root ::= "a" b\nb ::= "c"', "ac"),
        GrammarKind.LARK: ('start: "a" b\nb: "c"', "ac"),
    }
    source, text = sources[kind]
    spec = GrammarSpec(kind=kind, source=source, begins_after=marker)
    for before in ("", "some thought\n", "EN EN {"):
        assert accepts(grammars, spec, f"{before}{marker}{text}", special=True), before
    for whole in (text, marker, f"x{marker}{text}{text}{text}!", f"x{marker}y{marker}{text}"):
        assert not accepts(grammars, spec, whole, special=True), whole


@pytest.mark.parametrize("opening", ["BEGIN", "<s>"])
@pytest.mark.parametrize("marker", ["END", "<|im_start|>"])
def test_only_an_output_that_is_opened_so_may_have_something_before_the_grammar(
    grammars: Grammars, opening: str, marker: str
) -> None:
    spec = GrammarSpec(kind=GrammarKind.REGEX, source="a+/", begins_after=marker, opened_by=opening)
    for whole in ("aa/", f"{opening}{marker}aa/", f"{opening} EN thought\n{marker}a/"):
        assert accepts(grammars, spec, whole, special=True), whole
    bad = (f"thought{marker}a/", f"{opening}a/", f"{opening}x{marker}x", f"a/{opening}x{marker}a/")
    for whole in ("", "x", *bad):
        assert not accepts(grammars, spec, whole, special=True), whole
    assert not accepts(grammars, msgspec.structs.replace(spec, opened_by=""), "aa/")


REFUSALS: list[tuple[GrammarKind, str, str]] = [
    (JSON, '{"type":', "it is not JSON"),
    (JSON, "[1]", "expected a JSON object, or true or false"),
    (JSON, '{"type": "strin"}', "Invalid type: strin"),
    (JSON, '{"type": "string", "fooBar": 1}', "unknown keyword 'fooBar'"),
    (JSON, '{"properties": {"a": {"fooBar": 1}}}', "unknown keyword 'fooBar'"),
    (JSON, '{"$defs": {"a": {"anyOf": [{}, {"items": {"fooBar": 1}}]}}}', "unknown keyword 'fooBar'"),
    (JSON, '{"x-guidance": {"whitespace_pattern": " *"}}', "unknown keyword 'x-guidance'"),
    (JSON, '{"x": 1}', "unknown keyword 'x'"),
    (JSON, '{"id": {"type": "string"}}', "unknown keyword 'id'"),
    (JSON, '{"properties": {"a": {"id": "http://example.com/"}}}', "unknown keyword 'id'"),
    (JSON, '{"type": "array", "uniqueItems": true}', "uniqueItems"),
    (JSON, '{"not": {"type": "string"}}', '"not"'),
    (JSON, '{"if": {}, "then": {}}', '"if"'),
    (JSON, '{"oneOf": [{"type": "object"}, {"type": "object", "properties": {"a": {}}}]}', "oneOf"),
    (JSON, '{"type": "string", "format": "nonsense"}', "Unknown format: nonsense"),
    (JSON, '{"$ref": "http://example.com/x.json"}', "http://example.com/x.json"),
    (JSON, '{"$ref": "#/$defs/a"}', "$defs/a"),
    (JSON, '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}',
     "leads back to itself for the same value"),
    (JSON, '{"properties": {"b": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}}',
     "$ref = '#/$defs/a' leads back to itself for the same value"),
    (JSON, "false", "no text satisfies it"),
    (JSON, '{"type": "array", "items": ' * 300 + "{}" + "}" * 300, "recursion limit exceeded"),
    (JSON, '{"type": "array", "items": ' * 5000 + "{}" + "}" * 5000, "nested too deeply"),
    (JSON, json.dumps({"$defs": {"a": {"properties": {f"p{i}": {} for i in range(451)}}}}),
     "an object has 451 properties that may be left out: at most 450 are allowed"),
    (JSON, '{"properties": {"a": {"minimum": 100000000000000000000}}}',
     "minimum = 100000000000000000000: expected a number from -9007199254740992 to 9007199254740992"),
    (JSON, '{"minimum": 1e20}', "minimum = 1e+20: expected a number from"),
    (JSON, '{"type": "number", "maximum": 9223372036854775807}', "maximum = 9223372036854775807: expected"),
    (JSON, '{"exclusiveMaximum": -9007199254740993}', "exclusiveMaximum = -9007199254740993: expected"),
    (JSON, '{"exclusiveMaximum": 9223372036854775807}', "exclusiveMaximum = 9223372036854775807: expected"),
    (JSON, '{"exclusiveMinimum": 9223372036854775807}', "exclusiveMinimum = 9223372036854775807: expected"),
    (JSON, '{"multipleOf": 9007199254740993}', "multipleOf = 9007199254740993: expected"),
    (JSON, '{"const": 9007199254740993}', "const = 9007199254740993: expected"),
    (JSON, '{"anyOf": [{"enum": [1, {"a": [18446744073709551617]}]}]}',
     "enum = 18446744073709551617: expected"),
    (JSON, f'{{"const": {10**3000}}}', "const = an integer of 9966 bits: expected"),
    (JSON, '{"minProperties": 2, "additionalProperties": {"type": "boolean"}}',
     "minProperties = 2 is not supported with properties that the schema does not name"),
    (JSON, '{"type": ["object", "null"], "minProperties": 2, "required": ["a"], "properties": {"a": {}}}',
     "their keys may repeat: expected at most 1"),
    (JSON, '{"type": 5, "minProperties": 2}', "type must be a string or array of strings"),
    (JSON, '{"patternProperties": {"^\\\\d$": {"type": "string"}, "^[0-9]$": {"type": "integer"}}}',
     "patternProperties has two patterns that are the same"),
    (JSON, '{"minProperties": 2, "patternProperties": {"^x": {}}, "additionalProperties": false}',
     "minProperties = 2 is not supported"),
    (GrammarKind.REGEX, "(a", "unclosed group"),
    (GrammarKind.REGEX, "(?=a)b", "look-around"),
    (GrammarKind.CHOICE, "[]", "the list is empty"),
    (GrammarKind.CHOICE, '["a", 1]', "expected a list of texts"),
    (GrammarKind.EBNF, "root = [0-9]", "Expected ::="),
    (GrammarKind.EBNF, 'foo ::= "a"', "No 'root' rule found"),
    (GrammarKind.EBNF, "root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "is nested too deeply"),
    (GrammarKind.LARK, "start: foo", "unknown name"),
    (GrammarKind.LARK, 'start: "a" json\njson: %json {"$ref": "#/$defs/a"}',
     "response_format is refused: failed to compile JSON schema: Pointer '/$defs/a' does not exist"),
    (GrammarKind.LARK, f'start: "x" | "long" y\ny: {"x? " * 20_000}\nx: "a" /[0-9]+/ ","', "grammar size"),
    (GrammarKind.LARK, "start: " + "(" * 3000 + '"a"' + ")" * 3000, "too deeply nested"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "source", "problem"), REFUSALS, ids=[case[2] for case in REFUSALS])
def test_what_cannot_be_done_is_refused_by_name(
    grammars: Grammars, kind: GrammarKind, source: str, problem: str
) -> None:
    spec = GrammarSpec(kind=kind, source=source, field="response_format")
    with pytest.raises(InvalidRequestError) as raised:
        grammars.get(spec)
    message = str(raised.value)
    name = "response_format" if kind is GrammarKind.LARK else f"response_format ({kind.value})"
    assert message.startswith(f"{name} is refused: ")
    assert kind is GrammarKind.EBNF or "start:" not in message, "what the client has not written"
    assert problem in message
    assert len(message) < 400
    assert "\n" not in message


def test_extensions_and_the_identifier_of_draft_4_restrict_nothing(grammars: Grammars) -> None:
    schema = {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "id": "http://example.com/a",
        "x-kind": ["a"],
        "properties": {"a": {"$ref": "#/definitions/b"}},
        "required": ["a"],
        "definitions": {"b": {"x-order": {"minimum": 5, "fooBar": 1}, "type": "integer"}},
    }
    spec = GrammarSpec(kind=JSON, source=json.dumps(schema))
    assert accepts(grammars, spec, '{"a": 1}')
    assert not accepts(grammars, spec, '{"a": "b"}')


def test_properties_may_have_the_names_of_keywords(grammars: Grammars) -> None:
    spec = schema({"fooBar": {"const": 1}, "if": {"const": 2}, "not": {"const": 3}})
    assert accepts(grammars, spec, '{"fooBar": 1, "if": 2, "not": 3}')


def large(kind: str) -> GrammarSpec:
    names = [f"a_property_{number}" for number in range(1500)]
    anything: dict[str, Any] = {f"p{number}": {} for number in range(22_000)}
    whole: Any = {
        "enum": {"enum": [f"x{number}" for number in range(20_000)]},
        "any": {"properties": anything, "required": [*anything]},
        "properties": {
            "type": "object",
            "properties": {name: {"type": "string"} for name in names},
            "required": names[:1200],
        },
        "good": {"enum": [1], "description": "d" * 40_000},
    }
    return GrammarSpec(kind=JSON, source=json.dumps(whole[kind]))


def test_large_grammars_compile_too(grammars: Grammars) -> None:
    assert accepts(grammars, large("good"), "1")
    text = json.dumps({f"a_property_{number}": "x" for number in (*range(1200), 1499)})
    assert accepts(grammars, large("properties"), text)


def patterns(num_patterns: int) -> GrammarSpec:
    """A schema of some hundred bytes that keeps a compiler busy for ever."""
    parts = [{"pattern": f"a{number}.*b"} for number in range(num_patterns)]
    return GrammarSpec(kind=JSON, source=json.dumps({"type": "string", "allOf": parts}))


def test_what_takes_too_long_or_too_much_memory_is_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SMALL_WORK_S", 1)
    monkeypatch.setattr(limits, "HELPER_MEMORY_BYTES", 16 << 20)
    grammars = Grammars(folder, VOCAB_SIZE, EOS_IDS)
    with closing(grammars):
        # Every property may hold anything.
        for hostile in (patterns(200), large("any")):
            with pytest.raises(InvalidRequestError, match=r"1?[01] s of work and 16 MiB of memory"):
                grammars.get(hostile)
            assert accepts(grammars, SPECS[4], "abc-12")


def test_a_grammar_is_refused_long_before_its_engine_counts_as_hanging() -> None:
    """Also if it is tried twice, because its first helper was killed."""
    assert ClientTimings().watchdog_s >= 2 * limits.HELPER_TIMEOUT_S


def test_a_helper_that_has_ended_is_started_again(folder: Path) -> None:
    grammars = Grammars(folder, VOCAB_SIZE, EOS_IDS)
    for number in range(2):
        grammars.get(GrammarSpec(kind=JSON, source=json.dumps({"const": number})))
        grammars.close()


def test_as_many_properties_may_be_left_out_as_the_limit_allows(grammars: Grammars) -> None:
    """Also where the object is in another one, and whatever its last property is."""
    inner = {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(450)}}
    source = json.dumps({"type": "object", "properties": {"a": inner}, "required": ["a"]})
    assert accepts(grammars, GrammarSpec(kind=JSON, source=source), '{"a": {"p3": 1, "p4": 2, "p449": 3}}')
    inner["required"] = [f"p{number}" for number in range(400)]
    inner["properties"] = {f"p{number}": {"type": "integer"} for number in range(850)}
    text = json.dumps({f"p{number}": 1 for number in range(401)})
    assert accepts(grammars, GrammarSpec(kind=JSON, source=json.dumps(inner)), text)


def test_a_text_with_too_many_ways_to_go_on_ends_with_an_error(grammars: Grammars) -> None:
    source = f'start: "x" | "long" y\ny: {"x? " * 1_500}\nx: "a" /[0-9]+/ ","'
    grammar = grammars.get(GrammarSpec(kind=GrammarKind.LARK, source=source))
    matcher, other = grammar.matcher(), grammar.matcher()
    matcher.advance(grammars.tokenizer.tokenize_str("longa1,"))
    assert matcher.error == "at one place of the text it has too many ways to go on"
    other.advance(grammars.tokenizer.tokenize_str("x"))
    assert not other.error


def test_a_helper_that_was_killed_is_no_fault_of_the_next_grammar(folder: Path) -> None:
    grammars = Grammars(folder, VOCAB_SIZE, EOS_IDS)
    with closing(grammars):
        for number in range(3):
            grammars.get(GrammarSpec(kind=JSON, source=json.dumps({"const": number})))
            process = grammars._small_helper._process
            assert process is not None
            process.kill()
            # Once it may still be ending when the next grammar comes. It is listed until it was waited for.
            while number and psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)


def test_a_grammar_that_is_too_large_for_the_compiler_is_refused_in_a_line(grammars: Grammars) -> None:
    choices = [
        {"anyOf": [{"type": "object", "properties": {f"a{j}_{i}": {"type": "integer"}}} for i in range(9)]}
        for j in range(4)
    ]
    with pytest.raises(InvalidRequestError, match="grammar size") as refused:
        grammars.get(GrammarSpec(kind=JSON, source=json.dumps({"allOf": choices})))
    assert "backtrace" not in str(refused.value)
    assert readable("panic: assertion failed\n<backtrace>\n 0: <unknown>") == "it is too large"


def test_too_large_a_source_is_refused_unread(grammars: Grammars) -> None:
    spec = GrammarSpec(kind=JSON, source="x" * (limits.MAX_SOURCE_BYTES + 1))
    with pytest.raises(InvalidRequestError, match="it has 524289 bytes: at most 524288 are allowed"):
        grammars.get(spec)
    marked = GrammarSpec(kind=GrammarKind.REGEX, source="a", begins_after="é" * 129)
    opened = msgspec.structs.replace(marked, begins_after="a", opened_by="é" * 129)
    with pytest.raises(InvalidRequestError, match="opened_by has 258 bytes: at most 256 are allowed"):
        grammars.get(opened)
    with pytest.raises(InvalidRequestError, match="begins_after has 258 bytes: at most 256 are allowed"):
        grammars.get(marked)


def test_grammars_are_kept_up_to_limits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_KEPT_GRAMMARS", 5)
    monkeypatch.setattr(limits, "MAX_KEPT_SOURCE_BYTES", 2_000)
    grammars = Grammars(folder, VOCAB_SIZE, EOS_IDS)
    specs = [GrammarSpec(kind=JSON, source=json.dumps({"const": number})) for number in range(300)]
    held = grammars.get(specs[0])
    for spec in specs:
        grammars.get(spec)
        assert len(grammars) <= 5
    gc.collect()
    assert [number for number, spec in enumerate(specs) if grammars.find(spec)] == [0, *range(295, 300)]
    assert grammars.find(specs[0]) is held
    # One that is used again stays.
    grammars.get(specs[295])
    grammars.get(specs[1])
    assert grammars.find(specs[295]) is not None
    assert grammars.find(specs[296]) is None
    grammars.get(GrammarSpec(kind=JSON, source=json.dumps({"const": 1, "description": "d" * 1_950})))
    assert len(grammars) < 5


def test_what_is_worn_out_is_found_by_its_holders_alone(folder: Path) -> None:
    spec = SPECS[4]
    with closing(Grammars(folder, VOCAB_SIZE, EOS_IDS)) as grammars:
        worn = grammars.get(spec)
        grammars.forget(worn)
        assert (grammars.find(spec), len(grammars)) == (None, 0)
        assert grammars.held(spec) is worn
        fresh = grammars.get(spec)
        assert fresh is not worn
        # Another text that holds the first one wears it out too.
        grammars.forget(worn)
        assert grammars.find(spec) is fresh
        assert grammars.held(spec) is fresh
        grammars.forget(fresh)
        del fresh
        gc.collect()
        assert grammars.held(spec) is worn
        assert grammars.find(spec) is None
        del worn
        gc.collect()
        assert grammars.held(spec) is grammars.find(spec)


def test_the_clients_name_of_the_field_makes_no_other_grammar(grammars: Grammars) -> None:
    source = '{"const": "named"}'
    first, second = (GrammarSpec(kind=JSON, source=source, field=name) for name in ("a", "b"))
    assert grammars.get(first) is grammars.get(second)


def test_a_checkpoint_without_a_fast_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"needs a tokenizer\.json"):
        Grammars(tmp_path, VOCAB_SIZE, EOS_IDS).get(SPECS[0])


@pytest.mark.parametrize("vocab_size", [100, VOCAB_SIZE, 1000])
def test_the_models_vocabulary_may_be_smaller_or_larger(folder: Path, vocab_size: int) -> None:
    grammars = Grammars(folder, vocab_size, EOS_IDS)
    filler = grammars.mask_filler()
    masks = filler.empty_masks(2)
    filler.fill(masks, {1: grammars.get(SPECS[0]).matcher()})
    assert masks.any(axis=1).tolist() == [False, True]


@pytest.mark.parametrize("max_length", [1, 4, 11, 40, None])
def test_groups_of_tokens_change_no_mask(folder: Path, grammars: Grammars, max_length: int | None) -> None:
    text = {"type": "string"} | ({} if max_length is None else {"maxLength": max_length})
    spec = GrammarSpec(kind=JSON, source=json.dumps({"type": "array", "items": text}))
    plain = LLTokenizer(
        (folder / "tokenizer.json").read_text(), n_vocab=VOCAB_SIZE, eos_token=list(EOS_IDS), slices=[]
    )
    _, expected = compile_text(spec, Tokens(plain, {}))
    found = grammars.get(spec).matcher()
    filler = MaskFiller(plain, num_threads=1)
    masks = filler.empty_masks(2)
    for token_id in plain.tokenize_str('["quick brown é\\n\\u00e9 fox", ""'):
        filler.fill(masks, {0: expected, 1: found})
        assert (masks[0] == masks[1]).all()
        expected.advance([token_id])
        found.advance([token_id])
        assert bool(expected.error) == bool(found.error)
    assert max_length is None or max_length > 20 or expected.error


def test_matchers_of_a_grammar_move_on_their_own(grammars: Grammars) -> None:
    grammar = grammars.get(SPECS[0])
    first, second = grammar.matcher(), grammar.matcher()
    ids = grammars.tokenizer.tokenize_str('{"name": "x')
    first.advance(ids)
    clone = first.clone()
    clone.advance(grammars.tokenizer.tokenize_str("!"))
    assert second.num_allowed(ids) == first.num_allowed(clone.forced()) + len(ids)
    second.advance([EOS_IDS[0]])
    assert second.error
    assert (second.num_allowed(ids), second.forced(), second.is_complete) == (0, [], False)
    filler = grammars.mask_filler()
    masks = filler.empty_masks(3)
    filler.fill(masks, {0: first, 1: second, 2: clone})
    assert masks.any(axis=1).tolist() == [True, False, True]
