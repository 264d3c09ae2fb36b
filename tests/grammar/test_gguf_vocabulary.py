"""Grammars with the tokenizer that a GGUF file describes."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.drafting_engines import engine_parts
from helpers.gguf_files import write_gguf
from helpers.quantised_cases import SIZES
from helpers.tiny_models import make_tiny_model
from naiad.errors import InvalidRequestError
from naiad.grammar import Grammars
from naiad.sequence import EngineRequest, FinishReason, GrammarKind, GrammarSpec, SamplingParams
from naiad.tokenization import Tokenizer
from naiad.tokenization.text_decoder import decode

WORDS = ["hello w12", "o", "helpless"]
CHOICE = GrammarSpec(kind=GrammarKind.CHOICE, source=json.dumps(WORDS))
BOOLEAN = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source='{"type": "boolean"}')


def sentence_piece_keys() -> dict[str, Any]:
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_of, "▁", "h", "e", "l", "o", "el", "lo", "▁h"]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * (len(tokens) - 3) + [-1.0, -2.0, -3.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "llama.vocab_size": len(tokens),
    }


@pytest.fixture(scope="module", params=["byte-level", "SentencePiece"])
def gguf_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    changes = sentence_piece_keys() if request.param == "SentencePiece" else {}
    vocab_size = {"vocab_size": len(changes["tokenizer.ggml.tokens"])} if changes else {}
    model = make_tiny_model(folder / "model", "LlamaForCausalLM", **{**SIZES, **vocab_size})
    write_gguf(folder / "model.gguf", model, changes=changes)
    return folder / "model.gguf"


def test_an_engine_with_a_gguf_file_writes_what_the_grammar_says(gguf_file: Path) -> None:
    engine, runner = engine_parts(gguf_file, drafter="none", cpu_threads=1)
    tokenizer = Tokenizer.from_directory(gguf_file)
    ends = tuple(runner.model_config.eos_token_ids)
    texts = {}
    with closing(runner.grammars):
        for number, (spec, temperature) in enumerate([(CHOICE, 0.0), (CHOICE, 1.5), (BOOLEAN, 1.5)]):
            params = SamplingParams(
                max_tokens=40, grammar=spec, stop_token_ids=ends, temperature=temperature, seed=number
            )
            prompt = tokenizer.encode("hello", False)
            engine.add_request(EngineRequest(sequence_id=number, prompt_token_ids=prompt, params=params))
            token_ids: list[int] = []
            while engine.has_work:
                for output in engine.step():
                    assert output.finish_reason in (None, FinishReason.STOP), output.error_message
                    token_ids += output.token_ids
            texts[number] = decode(tokenizer.table, token_ids, skip_special_tokens=True)
    assert {texts[0], texts[1]} <= set(WORDS)
    assert texts[2] in ("true", "false")


def test_the_default_model_allows_the_same_tokens_in_both_forms(
    default_gguf: Path, default_model_dir: Path
) -> None:
    """At every place of a text, and for each kind of grammar."""
    text = '{"name": "Zoë", "age": 37}'
    person = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    spec = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, source=json.dumps(person))
    masks = []
    for path in (default_gguf, default_model_dir):
        with closing(Grammars(path, 49152, (2,))) as grammars:
            filler, matcher = grammars.mask_filler(), grammars.get(spec).matcher()
            token_ids = grammars.tokenizer.tokenize_str(text)
            found = filler.empty_masks(len(token_ids) + 1)
            for place, token_id in enumerate([*token_ids, None]):
                filler.fill(found, {place: matcher})
                if token_id is not None:
                    matcher.advance([token_id])
            assert matcher.is_complete
            masks.append(found)
    assert masks[0].any(axis=1).all()
    assert np.array_equal(masks[0], masks[1])


def test_a_file_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "LlamaForCausalLM", **SIZES)
    write_gguf(tmp_path / "model.gguf", model, changes={"tokenizer.ggml.model": "bert"})
    with pytest.raises(InvalidRequestError, match=r"it needs a tokenizer\.json, or a tokenizer in the GGUF"):
        Grammars(tmp_path / "model.gguf", SIZES["vocab_size"], (1,)).get(CHOICE)
