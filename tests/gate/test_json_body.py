"""Bodies of the inference protocol: what passes, and how it is sent on."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from naiad.gate.json_body import checked_inference, checked_json
from naiad.gate.limits import Limits
from naiad.gate.refusal import RefusedError

INPUT = {"name": "a", "shape": [1, 1], "datatype": "INT32"}


def infer(**more: Any) -> bytes:
    return json.dumps({"inputs": [INPUT | {"data": [1]}], **more}).encode()


def test_binary_inputs_keep_their_bytes() -> None:
    text = json.dumps({"inputs": [INPUT | {"parameters": {"binary_data_size": 4}}]}).encode()
    body, length = checked_inference(text + b"\0\1[{", len(text), Limits())
    assert length is not None
    assert (json.loads(body[:length]), body[length:]) == (json.loads(text), b"\0\1[{")


def test_plain_inputs_pass() -> None:
    body, length = checked_inference(infer(parameters={"priority": 1}), None, Limits())
    assert (json.loads(body), length) == (json.loads(infer(parameters={"priority": 1})), None)


@pytest.mark.parametrize(
    ("body", "length", "named"),
    [
        (infer(outputs=[{"name": "o", "parameters": {"classification": 1}}]), None, "class_count"),
        (infer(outputs=[{"name": "o", "parameters": {"classification": 0}}]), None, "class_count"),
        (
            infer(outputs=[{"name": "o", "parameters": {"shared_memory_region": "r"}}]),
            None,
            "shared_memory_region",
        ),
        (infer(inputs=[{"parameters": {"shared_memory_offset": 1}}]), None, "shared_memory_offset"),
        (infer(parameters={"triton_x": 1}), None, "triton_x"),
        (infer(inputs=[{"parameters": {"triton_x": 1}}]), None, "triton_x"),
        (infer(outputs=[{"name": "o", "parameters": {"triton_x": 1}}]), None, "triton_x"),
        (infer(parameters=[1]), None, "parameters"),
        (infer(inputs={"a": 1}), None, "inputs"),
        (infer(outputs=[{"name": str(n)} for n in range(257)]), None, "257 outputs"),
        (infer(inputs=[{"parameters": {"binary_data_size": 5}}]) + b"four", -4, "binary_data_size"),
        (infer(inputs=[{"parameters": {"binary_data_size": -4}}]) + b"four", -4, "binary_data_size"),
        (infer(inputs=[{"parameters": {"binary_data_size": 2**64 + 4}}]) + b"four", -4, "binary_data_size"),
        (infer(inputs=[{"parameters": {"binary_data_size": True}}]), None, "binary_data_size"),
        (infer(), 10_000, "10000"),
    ],
)
def test_what_does_not_pass_is_named(body: bytes, length: int | None, named: str) -> None:
    if length is not None and length < 0:
        length += len(body)
    with pytest.raises(RefusedError) as refused:
        checked_inference(body, length, Limits())
    assert named in str(refused.value)
    assert refused.value.http_status == 400


@pytest.mark.parametrize("fields", [{"triton_x": 1}, {"parameters": {"triton_x": 1}}])
def test_parameters_of_generate_are_checked_too(fields: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match="triton_x does not pass"):
        checked_json(json.dumps({"text_input": "a", **fields}).encode(), Limits())
    known = json.dumps({"text_input": "a", "triton_enable_empty_final_response": True}).encode()
    assert json.loads(checked_json(known, Limits())) == json.loads(known)


def test_a_key_that_comes_twice_cannot_hide_anything() -> None:
    """Triton takes the first one, others the last one: only the one that was checked is sent on."""
    hidden = b'{"outputs": [{"name": "o", "parameters": {"classification": 1}}], "outputs": [], "inputs": []}'
    body, _ = checked_inference(hidden, None, Limits())
    assert b"classification" not in body


def test_numbers_and_text_stay_what_they_are() -> None:
    values = {
        "i": 2**63 - 1,
        "u": 2**64 - 1,
        "n": -(2**63),
        "f": 0.1,
        "e": 1e300,
        "t": 'ü"\\\u2028',
        "z": None,
    }
    assert json.loads(checked_json(json.dumps(values).encode(), Limits())) == values


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"1" * 100_000])
def test_numbers_that_nothing_can_hold_are_refused(number: bytes) -> None:
    with pytest.raises(RefusedError):
        checked_json(b'{"a": %s}' % number, Limits())


@pytest.mark.parametrize(
    "inner",
    [
        b"[]," * 1_400_000 + b"1",
        b'{"a":1},' * 10_000 + b"1",
        # Strings that end in backslashes, and one with a quote before a bracket.
        rb'"a\\",[],"\\\\",{},"\"[",' * 5_000 + b"1",
    ],
)
def test_more_lists_and_objects_than_a_request_has_are_refused_unread(
    inner: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(msgspec.json, "decode", pytest.fail)
    for body in (b'{"a":[%s]}' % inner, b'{"inputs":[%s]}' % inner):
        with pytest.raises(RefusedError, match="more than 10000 lists and objects") as refused:
            checked_inference(body, None, Limits())
        assert refused.value.http_status == 400
        with pytest.raises(RefusedError, match="more than 10000 lists and objects"):
            checked_json(body, Limits())


@pytest.mark.parametrize("unit", ["{", "[]", '"[', "\\[", '\\"{', "{}\n", '{"a": "\\\\"}'])
def test_brackets_in_a_prompt_do_not_count(unit: str) -> None:
    body = json.dumps({"text_input": unit * 100_000}).encode()
    assert json.loads(checked_json(body, Limits())) == json.loads(body)


def test_lists_and_objects_are_counted_as_they_are_read() -> None:
    draw = random.Random(3)

    def value(depth: int) -> Any:
        kind = draw.randrange(4 if depth else 1)
        if kind == 1:
            return [value(depth - 1) for _ in range(draw.randrange(5))]
        if kind == 2:
            return {text(): value(depth - 1) for _ in range(draw.randrange(5))}
        return draw.choice([1, None, text(), text()])

    def text() -> str:
        return "".join(draw.choice('[{"\\ü:,') for _ in range(draw.randrange(6)))

    def num_containers(value: Any) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return isinstance(value, dict | list) + sum(map(num_containers, inner))

    for _ in range(500):
        whole = value(4)
        limits = Limits(max_containers=num_containers(whole) + 1)
        body = json.dumps({"a": whole}, ensure_ascii=draw.random() < 0.5).encode()
        assert json.loads(checked_json(body, limits)) == {"a": whole}
        if limits.max_containers > 1:
            with pytest.raises(RefusedError, match="lists and objects"):
                checked_json(body, Limits(max_containers=limits.max_containers - 1))
