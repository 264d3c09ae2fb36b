"""Whether unstreamed and streamed ids of `llm` include the prompt, and requests of several rows."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from helpers.preset_server import infer, stream
from helpers.raw_grpc import ENDLESS, Outcome, Stream, as_tensor, ask, llm_inputs
from helpers.server import Server, eventually

PROMPTS = ([294, 360, 307, 355, 388], [291, 288])
NUM_TOKENS = 6
# A busy machine may merge all tokens of one answer into one chunk.
NUM_ATTEMPTS = 20
EXCLUDING = "excluding_tensorrt_llm"
LLMS = ("llm", "unary_tensorrt_llm", EXCLUDING)
WAYS = [
    ("infer", "unary_tensorrt_llm"),
    *((way, model) for way in ("stream", "generate", "generate_stream") for model in LLMS),
]
Exclude = bool | None


@pytest.fixture(scope="module")
def made(presets: Server) -> list[list[int]]:
    """The new ids of each prompt, requested alone."""
    ids = [ask(presets.grpc, "llm", llm_inputs(each, 60, ignore_eos=True)).token_ids for each in PROMPTS]
    assert [len(each) for each in ids] == [60, 60]
    return ids


def inputs_of(exclude: Exclude, is_streamed: bool) -> dict[str, Any]:
    inputs = llm_inputs(PROMPTS[0], NUM_TOKENS, ignore_eos=True, streaming=is_streamed)
    del inputs["exclude_input_in_output"]
    return inputs if exclude is None else inputs | {"exclude_input_in_output": exclude}


def expected(model: str, exclude: Exclude, made: list[list[int]]) -> list[int]:
    is_excluded = model == EXCLUDING if exclude is None else exclude
    return ([] if is_excluded else PROMPTS[0]) + made[0][:NUM_TOKENS]


def flat(output: Any) -> list[int]:
    """Flatten an output; in JSON a single value is not a list."""
    return np.array(output).reshape(-1).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("exclude", [None, True, False], ids=["absent", "true", "false"])
@pytest.mark.parametrize(("way", "model"), WAYS)
def test_unstreamed_ids_hold_the_prompt_unless_it_is_excluded(
    presets: Server, made: list[list[int]], model: str, exclude: Exclude, way: str
) -> None:
    inputs = inputs_of(exclude, is_streamed=False)
    if way in ("stream", "infer"):
        answer = {"stream": stream, "infer": infer}[way](presets, model, inputs)
    else:
        status, text = presets.post(f"/v2/models/{model}/{way}", inputs)
        assert status == 200
        answer = json.loads(text.removeprefix("data: "))
    ids = expected(model, exclude, made)
    assert flat(answer["output_ids"]) == ids
    assert flat(answer["sequence_length"]) == [len(ids)]


def streamed(presets: Server, model: str, inputs: dict[str, Any], way: str) -> list[dict[str, Any]]:
    """The chunks of one streamed answer, by gRPC or by HTTP."""
    if way == "stream":
        outcome = ask(presets.grpc, model, inputs)
        assert (outcome.errors, outcome.num_finals) == ([], 1)
        return outcome.responses
    status, text = presets.post(f"/v2/models/{model}/generate_stream", inputs)
    assert status == 200
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]


@pytest.mark.parametrize("exclude", [None, True, False], ids=["absent", "true", "false"])
@pytest.mark.parametrize("model", ["llm", EXCLUDING])
@pytest.mark.parametrize("way", ["stream", "generate_stream"])
def test_streamed_ids_are_deltas_without_the_prompt(
    presets: Server, made: list[list[int]], model: str, exclude: Exclude, way: str
) -> None:
    inputs = inputs_of(exclude, is_streamed=True) | {"request_output_len": len(made[0])}
    for _ in range(NUM_ATTEMPTS):
        chunks = streamed(presets, model, inputs, way)
        ids = [flat(chunk["output_ids"]) for chunk in chunks]
        assert [flat(chunk["sequence_length"]) for chunk in chunks] == [[len(each)] for each in ids]
        assert [token_id for each in ids for token_id in each] == made[0]
        if len(chunks) > 1:
            return
    pytest.fail(f"all of {NUM_ATTEMPTS} streams arrived as one chunk")


def rows(max_tokens: tuple[int, int], **more: Any) -> dict[str, Any]:
    """Inputs with both prompts, the shorter one padded, and with `more` in both rows."""
    width = len(PROMPTS[0])
    ids = np.array([[*each, *[7] * (width - len(each))] for each in PROMPTS], dtype=np.int32)
    each_row = {"ignore_eos": True, "return_finish_reason": True, **more}
    return {
        "input_ids": ids,
        "input_lengths": np.array([[len(each)] for each in PROMPTS], dtype=np.int32),
        "request_output_len": np.array(max_tokens, dtype=np.int32).reshape(2, 1),
        **{name: np.repeat(as_tensor(value), 2, axis=0) for name, value in each_row.items()},
    }


def by_row(outcome: Outcome) -> list[list[dict[str, Any]]]:
    found: list[list[dict[str, Any]]] = [[], []]
    for response in outcome.responses:
        assert response["batch_index"].shape == (1, 1)
        found[response["batch_index"].item()].append(response)
    return found


@pytest.mark.parametrize("is_excluded", [True, False])
def test_unstreamed_rows_have_a_response_each(
    presets: Server, made: list[list[int]], is_excluded: bool
) -> None:
    inputs = rows((60, 3), streaming=False, exclude_input_in_output=is_excluded)
    for _ in range(NUM_ATTEMPTS):
        outcome = ask(presets.grpc, "llm", inputs)
        assert (outcome.errors, outcome.num_finals) == ([], 1)
        for (response,), prompt, ids in zip(by_row(outcome), PROMPTS, (made[0], made[1][:3]), strict=True):
            whole = ids if is_excluded else prompt + ids
            assert response["output_ids"].tolist() == [[whole]]
            assert response["sequence_length"].tolist() == [[len(whole)]]
            assert response["finish_reason"].item() == b"length"
        # The short row does not wait for the other one.
        if [response["batch_index"].item() for response in outcome.responses] == [1, 0]:
            return
    pytest.fail(f"in all of {NUM_ATTEMPTS} requests the short row came last")


def test_streamed_rows_finish_on_their_own(presets: Server, made: list[list[int]]) -> None:
    for _ in range(NUM_ATTEMPTS):
        outcome = ask(presets.grpc, "llm", rows((60, 3), streaming=True))
        assert (outcome.errors, outcome.num_finals) == ([], 1)
        for responses, ids in zip(by_row(outcome), (made[0], made[1][:3]), strict=True):
            assert [i for response in responses for i in flat(response["output_ids"])] == ids
            reasons = [response["finish_reason"].item() for response in responses]
            assert reasons == [b""] * (len(reasons) - 1) + [b"length"]
        # The short row does not wait for the other one.
        if outcome.responses[-1]["batch_index"].item() == 0:
            return
    pytest.fail(f"in all of {NUM_ATTEMPTS} requests the short row came last")


def test_a_single_row_has_no_batch_index(presets: Server) -> None:
    outcome = ask(presets.grpc, "llm", inputs_of(None, is_streamed=True))
    assert not any("batch_index" in response for response in outcome.responses)


BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"request_output_len": [[6], [0]]}, "request_output_len = 0"),
    "longer than sent": ({"input_lengths": [[5], [6]]}, "input_lengths = 6"),
    "unknown id": ({"input_ids": [PROMPTS[0], [291, 4000, 0, 0, 0]]}, "4000"),
    "bad temperature": ({"temperature": [[0.5], [-1.0]]}, "temperature = -1"),
    "different flags": ({"exclude_input_in_output": [[True], [False]]}, "exclude_input_in_output differs"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
@pytest.mark.parametrize("is_streamed", [True, False])
def test_one_bad_row_refuses_the_whole_request(presets: Server, case: str, is_streamed: bool) -> None:
    changed, message = BAD_ROWS[case]
    arrays = {name: np.array(value) for name, value in changed.items()}
    kinds = {"i": np.int32, "f": np.float32, "b": np.bool_}
    arrays = {name: array.astype(kinds[array.dtype.kind]) for name, array in arrays.items()}
    outcome = ask(presets.grpc, "llm", rows((6, 6), streaming=is_streamed) | arrays)
    assert (outcome.responses, outcome.num_finals) == ([], 1)
    (error,) = outcome.errors
    assert message in error


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_stop_ends_all_rows(tiny: Server, is_streamed: bool) -> None:
    inputs = rows((ENDLESS, ENDLESS), streaming=is_streamed, exclude_input_in_output=True)
    asked = Stream(tiny.grpc, "llm", inputs, request_id="stop-me")
    eventually(lambda: scheduled(tiny) == 2)
    order = ask(tiny.grpc, "llm", llm_inputs([1], 1, stop=True), request_id="stop-me")
    assert (order.errors, order.responses, order.num_finals) == ([], [], 1)
    outcome = asked.join(30)
    assert (outcome.errors, outcome.num_finals) == ([], 1)
    for responses in by_row(outcome):
        assert [response["finish_reason"].item() for response in responses][-1] == b"cancelled"
        assert sum(response["output_ids"].size for response in responses) < ENDLESS
    assert is_streamed or len(outcome.responses) == 2
    eventually(lambda: scheduled(tiny) == 0)


def scheduled(server: Server) -> float:
    return server.metric("nv_trt_llm_request_metrics", request_type="scheduled", model="llm")
