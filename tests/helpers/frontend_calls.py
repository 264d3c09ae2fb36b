"""Sends one request to each frontend and protocol, and brings the answers into one form."""

from __future__ import annotations

import json
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2_grpc

from helpers.contract_page import page_rows
from helpers.frontend_requests import Fields, Request, is_greedy
from helpers.raw_grpc import Outcome, ask, build_request
from helpers.server import Server

# The outputs of a response: output → its values, flattened; text as str.
Piece = dict[str, list[Any]]
# (row, sequence) → all of its outputs together.
Answers = dict[tuple[int, int], Piece]

OUTPUTS = {row.name for row in page_rows("ensemble") if row.is_output and row.status == "served"}
INDICES = ("batch_index", "sequence_index")
JOINED = ("text_output", "finish_reason", "stop_reason")
ADDED = ("output_log_probs", "generation_logits", "top_log_prob_ids", "top_log_probs")
DRAFTED = {"acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens"}
TIMES = {f"{name}_time_ns" for name in ("arrival", "first_scheduled", "first_token", "last_token")}
BLOCKS = {f"kv_cache_{name}_blocks" for name in ("alloc_new", "reused", "alloc_total")}
# They depend on the clock, on the contents of the cache and on the engine's drafts.
OF_THE_MOMENT = DRAFTED | TIMES | BLOCKS | {"num_cached_tokens"}

VLLM_NAMES = {
    **{name: name for name in ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")},
    **{name: name for name in ("stop_token_ids", "bad_words", "allowed_token_ids", "ignore_eos")},
    **{name: name for name in ("include_stop_str_in_output", "seed", "num_draft_tokens", "priority")},
    "top_n_sigma": "top_n_sigma",
    **{"stop_words": "stop", "num_return_sequences": "n", "random_seed": "seed", "num_log_probs": "logprobs"},
}
# Fields that are tensors of the vLLM model; `return_log_probs` has another name there.
VLLM_TENSORS = (
    *("text_input", "messages", "exclude_input_in_output", "cache_salt", "min_length"),
    *(f"return_{name}" for name in ("finish_reason", "num_input_tokens", "num_output_tokens")),
)
VLLM_OUTPUTS = {
    *("text_output", "finish_reason", "stop_reason", "num_input_tokens", "num_output_tokens"),
    *("cum_log_probs", "top_log_prob_ids", "top_log_probs"),
}
# Fields that the vLLM model does not have, or that have other defaults there.
NOT_IN_VLLM = {"embedding_bias_words", "end_id", "top_p_decay"}


def by_stream(server: Server, model: str, request: Request, stream: bool, by_parameters: bool) -> Answers:
    tensors, more = request.sent(stream, by_parameters)
    return whole(_pieces(ask(server.grpc, model, tensors, **more)))


def by_steps(server: Server, steps: list[dict[str, Any]], request: Request, stream: bool) -> Answers:
    """Call the ensemble's steps one by one."""
    first, second, last = steps
    inputs, more = request.sent(stream, by_parameters=True)

    def take(step: dict[str, Any], values: Fields) -> list[Fields]:
        names = {inner: outer for inner, outer in step["input_map"].items() if outer in values}
        sent = {inner: values[outer] for inner, outer in names.items()}
        outcome = ask(server.grpc, step["model_name"], sent, **more)
        assert (outcome.errors, outcome.num_finals) == ([], 1), (step["model_name"], outcome.errors)
        outer_names = step["output_map"]
        return [
            {outer_names[name]: array for name, array in response.items() if name in outer_names}
            for response in outcome.responses
        ]

    (tokenized,) = take(first, inputs)
    generated = take(second, inputs | tokenized)
    return whole([flat(each) for chunk in generated for each in take(last, chunk)])


def by_http(server: Server, model: str, endpoint: str, request: Request, stream: bool) -> Answers:
    """Send JSON, which has no rows, so each row is a request."""
    answers: Answers = {}
    for row, asked in enumerate(request.each_row()):
        status, text = server.post(f"/v2/models/{model}/{endpoint}", asked.body(stream))
        assert status == 200, text
        events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
        values = [{n: v if isinstance(v, list) else [v] for n, v in each.items()} for each in events]
        answers |= _as_row(row, whole([{n: each[n] for n in each if n in OUTPUTS} for each in values]))
    return answers


def by_call(server: Server, model: str, request: Request) -> Answers:
    """Call a unary model over gRPC, once for each row."""
    answers: Answers = {}
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for row, asked in enumerate(request.each_row()):
            tensors, more = asked.sent(stream=False)
            response = stub.ModelInfer(build_request(model, tensors, **more))
            result = triton.InferResult(response)
            answers |= _as_row(
                row, whole([flat({o.name: result.as_numpy(o.name) for o in response.outputs})])
            )
    return answers


def by_vllm(server: Server, request: Request, stream: bool) -> Answers:
    answers: Answers = {}
    for row, asked in enumerate(request.each_row()):
        fields = asked.first
        outcome = ask(server.grpc, "vllm_model", _vllm_inputs(fields, stream))
        pieces = [
            {"sequence_index": [index]} | each
            for piece in _pieces(outcome)
            for index, each in enumerate(_vllm_sequences(piece, fields.get("num_log_probs", 0)))
        ]
        answers |= _as_row(row, whole(pieces))
    return answers


def goes_to_vllm(request: Request) -> bool:
    return not request.has_beams and not NOT_IN_VLLM & request.first.keys()


def whole(pieces: list[Piece]) -> Answers:
    """Join the responses of each sequence, however its output was divided."""
    found: dict[tuple[int, int], list[Piece]] = {}
    for piece in pieces:
        row, sequence = (int(piece.get(name, [0])[0]) for name in INDICES)
        found.setdefault((row, sequence), []).append(piece)
    return {key: _together(each) for key, each in found.items()}


def flat(response: Fields) -> Piece:
    return {
        name: [value.decode() if isinstance(value, bytes) else value for value in array.reshape(-1).tolist()]
        for name, array in response.items()
    }


def _together(pieces: list[Piece]) -> Piece:
    answer: Piece = {}
    for name in {name for piece in pieces for name in piece if name not in INDICES}:
        values = [piece[name] for piece in pieces if name in piece]
        if name in JOINED:
            answer[name] = ["".join(parts) for parts in zip(*values, strict=True)]
        elif name == "num_output_tokens":
            answer[name] = [sum(value for each in values for value in each)]
        elif name in ADDED:
            answer[name] = [value for each in values for value in each]
        else:
            answer[name] = values[-1]
    return answer


def _pieces(outcome: Outcome) -> list[Piece]:
    assert (outcome.errors, outcome.num_finals, outcome.call_error) == ([], 1, ""), outcome.errors
    return [flat(response) for response in outcome.responses]


def _as_row(row: int, answers: Answers) -> Answers:
    return {(row, sequence): each for (_, sequence), each in answers.items()}


def _vllm_inputs(fields: Fields, stream: bool) -> Fields:
    sampling = {VLLM_NAMES[name]: value for name, value in fields.items() if name in VLLM_NAMES}
    if sampling.get("top_p") == 0:
        del sampling["top_p"]
    if is_greedy(fields):
        sampling["temperature"] = 0.0
    if "logit_bias_ids" in fields:
        biases: dict[str, float] = {}
        for token_id, bias in zip(fields["logit_bias_ids"], fields["logit_bias_values"], strict=True):
            biases[str(token_id)] = biases.get(str(token_id), 0.0) + bias
        sampling["logit_bias"] = biases
    if "guided_decoding_guide" in fields:
        kind = "regex" if fields["guided_decoding_guide_type"] == "regex" else "grammar"
        sampling["structured_outputs"] = {kind: fields["guided_decoding_guide"]}
    inputs = {name: fields[name] for name in VLLM_TENSORS if name in fields}
    inputs |= {"return_cumulative_logprob": True} if "return_log_probs" in fields else {}
    inputs |= {"return_logprobs": True} if fields.get("num_log_probs") else {}
    inputs |= {"sampling_parameters": json.dumps(sampling), "stream": stream}
    kinds = {row.name: row for row in page_rows("vllm_model")}
    return {name: kinds[name].array(value, has_rows=False) for name, value in inputs.items()}


def _vllm_sequences(piece: Piece, num_log_probs: int) -> list[Piece]:
    """Split a response of all sequences into one for each, with the names of `ensemble`."""
    found = []
    for index in range(len(piece["text_output"])):
        own = {name: values[index if len(values) > 1 else 0] for name, values in piece.items()}
        answer = {name: [own[name]] for name in VLLM_OUTPUTS if name in own}
        if answer.get("finish_reason") == ["None"]:
            answer["finish_reason"] = [""]
        if "cumulative_logprob" in own:
            answer["cum_log_probs"] = [own["cumulative_logprob"]]
        if "logprobs" in own:
            answer |= _best(json.loads(own["logprobs"]), num_log_probs)
        found.append(answer)
    return found


def _best(log_probs: list[dict[str, Any]], num_log_probs: int) -> Piece:
    """The best tokens at each position, without the drawn token if it is not one of them."""
    ranked = [sorted(each.items(), key=lambda item: item[1]["rank"])[:num_log_probs] for each in log_probs]
    return {
        "top_log_prob_ids": [int(token_id) for each in ranked for token_id, _ in each],
        "top_log_probs": [details["logprob"] for each in ranked for _, details in each],
    }


def close(found: list[Any], expected: list[Any]) -> bool:
    """Whether the values are equal, up to a tolerance for floating-point numbers."""
    if len(found) != len(expected) or not any(isinstance(value, float) for value in expected):
        return found == expected
    return bool(np.allclose(found, expected, rtol=0, atol=1e-3))
