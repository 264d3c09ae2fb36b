"""`ModelConfig`: the settings of a checkpoint's config.json that all families have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from naiad.config.attention import AttentionSpec, LayerGroup
from naiad.config.checkpoint_json import Json, read_json
from naiad.config.quantised import OLDER_FILES
from naiad.config.quantised.layers import BlocksOfFile, QuantisedWeights
from naiad.errors import ModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of a checkpoint. Each family extends it with what its forward pass needs.

    Attributes:
        architecture: the architecture's name in config.json.
        num_layers: number of layers that are computed.
        head_dim: features of one head; num_heads × head_dim need not be hidden_size.
        attention: how each layer of the checkpoint attends; a model that consists of the first layers of
            another has more than `num_layers` of them.
        eos_token_ids: all ids in config.json and generation_config.json that end a text.
        dtype: data type in which weights that are not quantised are stored.
        quantised: how the weights of linear layers are quantised; None: they are not.
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
    quantised: QuantisedWeights | None = None

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """The layers grouped by window: first those without one, then by increasing window.

        A model that consists of another model's first layers has all groups of that model, so that both can
        use the same blocks; some of its groups may be empty.
        """
        windows = sorted({spec.window for spec in self.attention})
        return tuple(
            LayerGroup(
                window,
                tuple(index for index in range(self.num_layers) if self.attention[index].window == window),
            )
            for window in windows
        )

    @property
    def num_projection_weights(self) -> int:
        """Weights of the layers' projections, without biases."""
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        of_layer = self.hidden_size * (2 * query_size + 2 * kv_size + 3 * self.intermediate_size)
        return self.num_layers * of_layer

    @property
    def num_weights(self) -> int:
        """Weights of the projections, the embedding, and the head, even if that is the embedding."""
        return self.num_projection_weights + 2 * self.vocab_size * self.hidden_size

    @staticmethod
    def from_directory(path: str | Path) -> ModelConfig:
        """Read config.json, and generation_config.json if it exists, of a directory; or read a GGUF file.

        Raises:
            ModelError: a file is missing or is not a JSON object, or a key is missing or has an unsupported
                value; the message names the key and the value.
        """
        directory = Path(path)
        if directory.is_file():
            return _from_gguf(directory)
        config = _with_older_file(read_json(directory / "config.json"), directory)
        generation_path = directory / "generation_config.json"
        generation = read_json(generation_path) if generation_path.exists() else {}
        return ModelConfig.from_json(config, generation)

    @staticmethod
    def from_json(config: Json, generation: Json) -> ModelConfig:
        """Build a configuration from the two parsed files; raises the same errors as `from_directory`."""
        # Imported here because the families import this module.
        from naiad.config.families import read_model_config

        return read_model_config(config, generation)


def _with_older_file(config: Json, directory: Path) -> Json:
    """Add what the first tools wrote into a file beside config.json."""
    if config.get("quantization_config"):
        return config
    for method, name in OLDER_FILES.items():
        if (directory / name).is_file():
            return {**config, "quantization_config": {"quant_method": method, **read_json(directory / name)}}
    return config


def _from_gguf(path: Path) -> ModelConfig:
    # Imported only here: the library behind it takes every process a tenth of a second.
    from naiad.gguf import GGUFFile
    from naiad.gguf.model_keys import read_model_keys

    file = GGUFFile(path)
    keys = read_model_keys(file)
    try:
        config = ModelConfig.from_json(keys.config, keys.generation)
    except ModelError as error:
        raise ModelError(f"{file.name}: {str(error).removeprefix('config.json: ')}") from error
    return replace(config, quantised=BlocksOfFile())
