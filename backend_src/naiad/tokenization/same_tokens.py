"""Checks that two checkpoints have the same tokens under the same ids."""

from __future__ import annotations

from pathlib import Path

from naiad.errors import ConfigError
from naiad.tokenization.checkpoint_tokenizer import CheckpointTokenizer


def check_same_tokens(model_dir: str, draft_model: str) -> None:
    """Refuse a draft model whose ids denote other tokens than the served model's ids.

    Args:
        model_dir: directory of the served model; has a tokenizer.
        draft_model: directory of the draft model, which is accepted if it has no tokenizer.

    Raises:
        ConfigError: the tokens differ; the message names an id for which they do.
        ModelError: a tokenizer cannot be read.
    """
    draft = Path(draft_model)
    if not draft.is_file() and not (draft / "tokenizer.json").is_file():
        return
    tokens, draft_tokens = (_tokens(each) for each in (model_dir, draft_model))
    for token_id in sorted(tokens.keys() | draft_tokens.keys()):
        token, draft_token = tokens.get(token_id), draft_tokens.get(token_id)
        if token != draft_token:
            raise ConfigError(
                "draft_model",
                draft_model,
                f"a model with the tokens of {model_dir}: there id {token_id} is {token!r}, "
                f"here {draft_token!r}",
            )


def _tokens(directory: str) -> dict[int, str]:
    vocabulary = CheckpointTokenizer.load(directory).tokenizer.get_vocab(with_added_tokens=True)
    return {token_id: token for token, token_id in vocabulary.items()}
