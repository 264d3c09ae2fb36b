"""`ModelConfig`: what a checkpoint's config.json says, as far as every family has it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from naiad.config.attention import AttentionSpec, LayerGroup
from naiad.config.checkpoint_json import Json, read_json


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of a checkpoint. Each family of models extends it by what its forward pass needs.

    Attributes:
        architecture: its name in config.json.
        num_layers: layers that are computed.
        head_dim: features of one head; num_heads × head_dim need not be hidden_size.
        attention: how each layer of the checkpoint attends; more than `num_layers` in a model that is
            the first layers of another.
        eos_token_ids: every id that ends a text, of config.json and generation_config.json.
        dtype: of the weights as they are stored.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention: tuple[AttentionSpec, ...]
    eos_token_ids: tuple[int, ...]
    dtype: str

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """The layers by window: those without one first, then the smallest window first.

        The first layers of a model have the groups of the whole model, so that both can be computed over
        the same blocks; a group may then be empty.
        """
        windows = sorted({spec.window for spec in self.attention})
        return tuple(
            LayerGroup(
                window,
                tuple(index for index in range(self.num_layers) if self.attention[index].window == window),
            )
            for window in windows
        )

    @staticmethod
    def from_directory(path: str | Path) -> ModelConfig:
        """Read config.json (and generation_config.json, if there) of a checkpoint directory.

        Raises:
            ModelError: a file is missing or no JSON object, a key is missing or has a value we
                do not support; names the key and the value.
        """
        directory = Path(path)
        config = read_json(directory / "config.json")
        generation_path = directory / "generation_config.json"
        generation = read_json(generation_path) if generation_path.exists() else {}
        return ModelConfig.from_json(config, generation)

    @staticmethod
    def from_json(config: Json, generation: Json) -> ModelConfig:
        """Build from the two parsed files; raises as `from_directory` does."""
        # The families extend this class.
        from naiad.config.families import read_model_config

        return read_model_config(config, generation)
