"""A GGUF file is a model: weights, configuration, tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers.integrations.gguf import dequant

from helpers.gguf_files import CHAT_TEMPLATE, write_gguf
from helpers.quantised_cases import SIZES, expected_logits, logits_of
from helpers.tiny_models import make_tiny_model
from naiad.config import ModelConfig
from naiad.errors import ModelError
from naiad.gguf import GGUFFile, GGUFTensor
from naiad.models.gguf_source import GGUFRows
from naiad.models.quantised import materialised
from naiad.tokenization.chat_template import parse_messages
from naiad.tokenization.tokenizer import Tokenizer

KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def tiny(directory: Path, architecture: str = "LlamaForCausalLM", **overrides: Any) -> Any:
    return make_tiny_model(directory, architecture, **{**SIZES, **overrides})


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_computes_what_its_blocks_say(tmp_path: Path, kind: str) -> None:
    model = tiny(tmp_path / "model")
    meant = write_gguf(tmp_path / "model.gguf", model, kind)
    expected = expected_logits(model, meant)
    torch.testing.assert_close(logits_of(tmp_path / "model.gguf"), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_other_architectures_do_not_exchange_rows(tmp_path: Path, architecture: str) -> None:
    head_dim = {"head_dim": 16}
    model = tiny(tmp_path / "model", architecture, **head_dim, tie_word_embeddings=True)
    meant = write_gguf(tmp_path / "model.gguf", model, "Q8_0")
    expected = expected_logits(model, meant)
    torch.testing.assert_close(logits_of(tmp_path / "model.gguf"), expected, atol=1e-3, rtol=0)


def test_biases_of_queries_and_keys_are_in_the_same_order_as_their_rows(tmp_path: Path) -> None:
    model = tiny(tmp_path / "model", attention_bias=True, mlp_bias=True)
    meant = write_gguf(tmp_path / "model.gguf", model)
    expected = expected_logits(model, meant)
    torch.testing.assert_close(logits_of(tmp_path / "model.gguf"), expected, atol=1e-3, rtol=0)


def test_factors_of_the_rope_are_those_of_llama_3(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny(tmp_path / "model", rope_parameters=rope)
    factors = []
    for index in range(8):
        wavelength = 2 * np.pi * 500000.0 ** (index / 8)
        smooth = (8192 / wavelength - 1.0) / 3.0
        middle = 1 / ((1 - smooth) / 8.0 + smooth)
        factors.append(1.0 if wavelength < 2048 else 8.0 if wavelength > 8192 else middle)
    tensor = np.array(factors, dtype=np.float32)
    meant = write_gguf(tmp_path / "model.gguf", model, rope_freqs__weight=tensor)
    expected = expected_logits(model, meant)
    torch.testing.assert_close(logits_of(tmp_path / "model.gguf"), expected, atol=1e-3, rtol=0)
    write_gguf(tmp_path / "other.gguf", model, rope_freqs__weight=tensor**2)
    with pytest.raises(ModelError, match=r"other\.gguf: rope_freqs\.weight"):
        ModelConfig.from_directory(tmp_path / "other.gguf")


def test_blocks_are_what_transformers_takes_them_for(tmp_path: Path) -> None:
    """Random blocks of every type that both know; scales are made finite."""
    chance = np.random.default_rng(3)
    for number, (block, block_bytes) in dequant.GGML_BLOCK.items():
        kind = gguf.GGMLQuantizationType(number)
        rows, columns = 6, 2 * block
        data = chance.integers(0, 256, (rows, 2 * block_bytes), dtype=np.uint8)
        # No half-precision number may be infinite or NaN: one exponent bit of each byte pair is cleared.
        data[:, 1::2] &= 0xBF
        data[:, 0::2] &= 0xBF
        path = tmp_path / "blocks.bin"
        path.write_bytes(data.tobytes())
        found = materialised(_rows(path, (rows, columns), kind, data.nbytes), torch.float32)
        expected = dequant.dequantize(torch.from_numpy(data), number)
        torch.testing.assert_close(found, expected.view(rows, columns), atol=0, rtol=1e-5, msg=kind.name)


class _Bytes(GGUFFile):
    """A file of nothing but one tensor's blocks."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._memory = path.read_bytes()  # type: ignore[assignment]


def _rows(path: Path, shape: tuple[int, int], kind: Any, num_bytes: int) -> GGUFRows:
    return GGUFRows("blocks", shape, _Bytes(path), GGUFTensor(shape, kind, 0, num_bytes), None)


def test_tokenizer_and_chat_template_are_in_the_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", tiny(tmp_path / "model"))
    tokenizer = Tokenizer.from_directory(tmp_path / "model.gguf")
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    config = ModelConfig.from_directory(tmp_path / "model.gguf")
    assert config.eos_token_ids == (1,)
    texts = [tokenizer.table.visible_bytes(each, False) for each in tokenizer.encode("hello w12", False)]
    assert texts == [b"hel", b"l", b"o", b" w", b"1", b"2"]
    message = '[{"role": "user", "content": "he<|im_end|>"}]'
    assert parse_messages(message)
    ids = tokenizer.render_chat(message)
    assert ids.count(0) == 1
    assert 1 not in ids


def test_a_sentence_piece_vocabulary(tmp_path: Path) -> None:
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "e", "l", "o"]
    merged = ["▁h", "el", "▁hel", "lo", "▁hello"]
    tokens = letters + merged
    scores = [0.0] * len(letters) + [-float(rank) for rank in range(len(merged))]
    changes = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "llama.vocab_size": len(tokens),
    }
    write_gguf(tmp_path / "model.gguf", tiny(tmp_path / "model", vocab_size=len(tokens)), changes=changes)
    tokenizer = Tokenizer.from_directory(tmp_path / "model.gguf")
    ids = tokenizer.encode("hello é", add_special_tokens=True)
    assert [tokens[each] for each in ids] == ["<s>", "▁hello", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.table.first_bytes(tokens.index("▁hello")) == b"hello"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama.expert_count": 8}, r"llama\.expert_count = 8"),
        ({"llama.logit_scale": 2.0}, r"llama\.logit_scale = 2\.0"),
        ({"llama.rope.scaling.type": "yarn"}, r"rope\.scaling\.type = 'yarn'"),
        ({"llama.rope.dimension_count": 8}, r"rope\.dimension_count|attention\.key_length"),
        ({"llama.block_count": 0}, "num_hidden_layers = 0"),
        ({"llama.block_count": None}, r"llama\.block_count"),
        ({"llama.attention.head_count_kv": [2, 1]}, r"head_count_kv = \[2, 1\]"),
        ({"llama.vocab_size": 4}, "vocab_size = 4"),
        ({"split.count": 3}, r"split\.count = 3"),
        ({"general.alignment": 48}, r"general\.alignment = 48"),
        ({"tokenizer.ggml.tokens": None}, r"tokenizer\.ggml\.tokens"),
        ({"tokenizer.ggml.eos_token_id": 999}, "eos_token_id = 999|eos_token_id = \\[999"),
    ],
)
def test_a_key_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_gguf(tmp_path / "model.gguf", tiny(tmp_path / "model"), changes=changes)
    with pytest.raises(ModelError, match=rf"^model\.gguf: .*({message})"):
        ModelConfig.from_directory(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, r"ggml\.model = 'bert'"),
        ({"tokenizer.ggml.pre": "unheard-of"}, r"ggml\.pre = 'unheard-of'"),
        ({"tokenizer.ggml.token_type": [1]}, r"token_type = 1: expected|token_type = 1 "),
        ({"tokenizer.ggml.merges": ["a"]}, r"ggml\.merges"),
        ({"tokenizer.ggml.merges": ["x1 y1"]}, "can not be built"),
        ({"tokenizer.ggml.bos_token_id": 128}, "bos_token_id = 128"),
        ({"tokenizer.chat_template": 3}, "chat_template = 3"),
    ],
)
def test_a_tokenizer_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_gguf(tmp_path / "model.gguf", tiny(tmp_path / "model"), changes=changes)
    with pytest.raises(ModelError, match=rf"^model\.gguf: .*({message})"):
        Tokenizer.from_directory(tmp_path / "model.gguf")
