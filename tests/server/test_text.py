"""Text through the ensemble, as clients send and read it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from helpers.raw_grpc import Stream, ask, chunks, llm_inputs, text_inputs
from helpers.server import Server

PARIS = json.dumps([{"role": "user", "content": "What is the capital of France?"}])
PROMPTS = [
    "Emoji 😀👨‍👩‍👧‍👦🏳️‍🌈 are",
    "你好，世界。今天天气",
    "مرحبا بالعالم، كيف",
    "e\u0301le\u0300ve a\u030a",
    "   leading spaces  ",
    "<|im_start|>user\nSay 😀<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.fixture(scope="module")
def tokenizer(default_model_dir: Path) -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(default_model_dir)


def test_capital_of_france(server: Server) -> None:
    inputs = {"messages": PARIS, "max_tokens": 20, "stream": True, "return_finish_reason": True}
    outcome = ask(server.grpc, "ensemble", inputs)
    assert "Paris" in outcome.text
    assert list(chunks(outcome, "finish_reason"))[-1].item() == b"stop"


def test_http_generate_gives_one_answer(server: Server) -> None:
    body = {"messages": PARIS, "max_tokens": 20, "exclude_input_in_output": True}
    status, text = server.post("/v2/models/ensemble/generate", body)
    assert (status, json.loads(text)["text_output"]) == (200, "The capital of France is Paris.")


def test_http_generate_stream_gives_the_same_text_in_pieces(server: Server) -> None:
    body = {"messages": PARIS, "max_tokens": 20, "stream": True}
    _, text = server.post("/v2/models/ensemble/generate_stream", body)
    pieces = [json.loads(line[6:])["text_output"] for line in text.splitlines() if line.startswith("data: ")]
    assert len(pieces) > 1
    assert "".join(pieces) == "The capital of France is Paris."


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_streamed_unstreamed_and_decoded_text_agree(
    server: Server, tokenizer: AutoTokenizer, prompt: str, seed: int
) -> None:
    # A temperature far above 1 gives invalid byte sequences, special tokens and all scripts.
    sampling = {
        "temperature": 3.0,
        "top_p": 1.0,
        "seed": np.array([[seed]], dtype=np.uint64),
        "ignore_eos": True,
    }
    ids = tokenizer.encode(prompt)
    echo = {"stream": False, "exclude_input_in_output": False}
    asked = [
        Stream(server.grpc, "ensemble", text_inputs(prompt, 40, **sampling | how))
        for how in ({}, {"stream": False}, echo)
    ]
    tokens = ask(server.grpc, "llm", _llm_names(llm_inputs(ids, 40, **sampling))).token_ids
    streamed, plain, echoed = (stream.join().text for stream in asked)
    decoded = tokenizer.decode(ids + tokens, skip_special_tokens=True)
    assert echoed == decoded
    assert streamed == plain
    assert tokenizer.decode(ids, skip_special_tokens=True) + streamed == decoded


def test_stop_word_ends_the_text_before_it(server: Server) -> None:
    whole = ask(server.grpc, "ensemble", {"messages": PARIS, "max_tokens": 20, "stream": True}).text
    inputs = {"messages": PARIS, "max_tokens": 20, "stream": True, "stop_words": ["zzz", "of France"]}
    cut = ask(server.grpc, "ensemble", inputs | {"return_finish_reason": True})
    assert cut.text == whole[: whole.index("of France")]
    assert list(chunks(cut, "stop_reason"))[-1].item() == b"of France"


def test_empty_stop_word_means_none(server: Server) -> None:
    outcome = ask(server.grpc, "ensemble", text_inputs("Hello", 3, stop_words=[""]))
    assert (outcome.errors, outcome.num_finals) == ([], 1)


def test_counts_add_up(server: Server) -> None:
    inputs = text_inputs("One two three", 9, ignore_eos=True)
    outcome = ask(
        server.grpc, "ensemble", inputs | {"return_num_input_tokens": True, "return_num_output_tokens": True}
    )
    assert sum(each.item() for each in chunks(outcome, "num_output_tokens")) == 9
    assert {each.item() for each in chunks(outcome, "num_input_tokens")} == {3}


@pytest.mark.parametrize("model", ["ensemble", "text"])
def test_rows_of_a_batch_answer_as_alone(server: Server, model: str) -> None:
    prompts = ["Once upon a time", "The sky is", "def f(x):"]
    alone = [ask(server.grpc, model, text_inputs(prompt, 12)).text for prompt in prompts]
    inputs = {
        "text_input": np.array([[p.encode()] for p in prompts], dtype=np.object_),
        "max_tokens": np.full((3, 1), 12, dtype=np.int32),
        "stream": np.full((3, 1), True),
    }
    outcome = ask(server.grpc, model, inputs)
    texts = [b"", b"", b""]
    for response in outcome.responses:
        texts[response["batch_index"].item()] += response["text_output"].reshape(-1)[0]
    assert [text.decode() for text in texts] == alone
    assert outcome.num_finals == 1


def test_fields_work_as_parameters(server: Server) -> None:
    tensors = text_inputs("Tell me", 12, temperature=0.8, top_k=20, seed=np.array([[3]], dtype=np.uint64))
    as_tensors = ask(server.grpc, "ensemble", tensors).text
    parameters = {"temperature": 0.8, "top_k": 20, "seed": 3, "stream": True, "exclude_input_in_output": True}
    plain = {"text_input": "Tell me", "max_tokens": 12}
    as_parameters = ask(server.grpc, "ensemble", plain, parameters=parameters).text
    assert as_tensors
    assert as_parameters == as_tensors


def test_order_of_chunks_is_kept_at_32_streams(server: Server) -> None:
    prompts = [f"Count from {n}:" for n in range(32)]
    alone = [ask(server.grpc, "ensemble", text_inputs(p, 24, ignore_eos=True)).text for p in prompts[:4]]
    streams = [Stream(server.grpc, "ensemble", text_inputs(p, 24, ignore_eos=True)) for p in prompts]
    outcomes = [stream.join() for stream in streams]
    assert [outcome.text for outcome in outcomes[:4]] == alone
    assert all(outcome.num_finals == 1 and not outcome.errors for outcome in outcomes)


def test_tokenizer_and_detokenizer_serve_direct_users(server: Server) -> None:
    import tritonclient.grpc as triton

    client = triton.InferenceServerClient(server.grpc)
    query = triton.InferInput("QUERY", [1, 1], "BYTES")
    query.set_data_from_numpy(np.array([[b"Hello world"]], dtype=np.object_))
    length = triton.InferInput("REQUEST_OUTPUT_LEN", [1, 1], "INT32")
    length.set_data_from_numpy(np.array([[5]], dtype=np.int32))
    result = client.infer("tokenizer", [query, length])
    ids = result.as_numpy("INPUT_ID")
    assert result.as_numpy("STOP_WORDS_IDS").shape == (1, 2, 0)
    batch = {
        "TOKENS_BATCH": ids[None].astype(np.int32),
        "SEQUENCE_LENGTH": np.array([[ids.size]], dtype=np.int32),
    }
    outcome = ask(server.grpc, "detokenizer", batch)
    assert outcome.responses[0]["OUTPUT"].item() == b"Hello world"


def _llm_names(inputs: dict[str, object]) -> dict[str, object]:
    names = {"top_p": "runtime_top_p", "top_k": "runtime_top_k"}
    return {names.get(name, name): value for name, value in inputs.items()}
