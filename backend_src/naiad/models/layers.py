"""Parts that all families share: loading and fusing weights, residuals with norms, ropes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from naiad.config import ModelConfig
from naiad.config.attention import RopeConfig
from naiad.errors import ModelError
from naiad.models.split.checkpoint import AtFirstStage, SplitCheckpoint
from naiad.models.token_embedding import TokenEmbedding, WholeEmbedding
from naiad.models.weights import Checkpoint, Weights
from naiad_kernels.linear import LinearWeight, LoadOptions, linear, prepare_linear
from naiad_kernels.linear.quantised.kept import KeptWeight, joined_kept
from naiad_kernels.native.nibbles import NibbleWeight
from naiad_kernels.native.panels import narrowed
from naiad_kernels.rms_norm import add_rms_norm, rms_norm
from naiad_kernels.rotary import rotary_angles


def load_linear(
    weights: Weights,
    names: Sequence[str],
    out_features: Sequence[int],
    in_features: int,
    has_bias: bool,
) -> LinearWeight:
    """Load projections that read the same input and concatenate their output features.

    Args:
        weights: contain the projections.
        names: the projections' names without ".weight" and ".bias".
        out_features: the output features of each.
        in_features: the input features of all.
        has_bias: whether each has a bias.
    """
    sizes = list(zip(names, out_features, strict=True))

    def prepare(checkpoint: Checkpoint) -> LinearWeight:
        parts = [checkpoint.take_projection(f"{name}.weight", (size, in_features)) for name, size in sizes]
        bias = None
        if has_bias:
            bias = torch.cat([checkpoint.take(f"{name}.bias", (size,)) for name, size in sizes])
        matrix = _joined(parts, checkpoint.options.dtype)
        del parts
        return prepare_linear(matrix, bias, checkpoint.options)

    return weights.prepared_linear("+".join(names), (sum(out_features), in_features), prepare)


def load_embedding_and_head(config: ModelConfig, weights: Weights) -> tuple[TokenEmbedding, LinearWeight]:
    """Load the embedding and the head, which may share its weights."""
    shape = (config.vocab_size, config.hidden_size)
    if isinstance(weights, SplitCheckpoint) and not weights.has_ends:
        return AtFirstStage(), AtFirstStage()

    # Of the embedding, for a head that is the same: both are prepared anew, or neither.
    nibbles: NibbleWeight | None = None

    def read_embedding(checkpoint: Checkpoint) -> torch.Tensor:
        nonlocal nibbles
        name = "model.embed_tokens.weight"
        if config.tie_word_embeddings:
            matrix, nibbles = checkpoint.take_with_nibbles(name, shape)
        else:
            matrix = checkpoint.take_matrix(name, shape)
        # Half as many bytes are read for the same numbers.
        return narrowed(matrix) if checkpoint.options.native else matrix

    def prepare_head(checkpoint: Checkpoint) -> LinearWeight:
        if not config.tie_word_embeddings:
            return _prepare_head(*checkpoint.take_with_nibbles("lm_head.weight", shape), checkpoint.options)
        if not checkpoint.is_missing_or_same("lm_head.weight", table):
            raise ModelError(
                "tensor 'lm_head.weight' is not the embedding, and tie_word_embeddings = true in config.json "
                "says that the head is: set it to false to compute with the tensor"
            )
        return _prepare_head(table, nibbles, checkpoint.options)

    table = weights.prepared_table("model.embed_tokens", shape, read_embedding)
    head = weights.prepared_linear("lm_head", shape, prepare_head)
    if isinstance(weights, SplitCheckpoint):
        return weights.embedding(table), head
    return WholeEmbedding(table), head


def _joined(parts: Sequence[torch.Tensor | KeptWeight], dtype: torch.dtype) -> torch.Tensor | KeptWeight:
    """One below the other. Numbers of few bits are kept if all parts have such, of one kind."""
    kept = parts[0] if len(parts) == 1 else joined_kept(parts)
    if kept is not None:
        return kept
    device = next((each.device for each in parts if isinstance(each, torch.Tensor)), None)
    plain = [each if isinstance(each, torch.Tensor) else each.matrix().to(device, dtype) for each in parts]
    return torch.cat(plain)


def _prepare_head(matrix: torch.Tensor, nibbles: NibbleWeight | None, options: LoadOptions) -> LinearWeight:
    """The head decides between tokens and would lose most: it has int8 for fewer bits, or its own four."""
    if options.quantization in ("none", "int8"):
        return prepare_linear(matrix, options=options)
    kept = (nibbles or NibbleWeight.aligned(matrix)) if options.native else None
    if kept is not None:
        return prepare_linear(kept, options=options)
    return prepare_linear(matrix, options=replace(options, quantization="int8"))


def add_and_norm(
    x: torch.Tensor, projection: LinearWeight, residual: torch.Tensor, norm: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply a projection, add the residual, and normalise the sum.

    Args:
        x: `[num_tokens, in_features]`.
        projection: a projection to the model's hidden size.
        residual: `[num_tokens, hidden_size]`, not changed.
        norm: `[hidden_size]`, the norm's weight.
        eps: added to the mean square.

    Returns:
        The normalised sum, and the sum: `[num_tokens, hidden_size]` each.
    """
    if not product_adds(x.device):
        return add_rms_norm(linear(x, projection), residual, norm, eps)
    total = linear(x, projection, residual=residual)
    return rms_norm(total, norm, eps), total


def product_adds(device: torch.device) -> bool:
    """Whether a matrix product adds a residual at no cost; otherwise the following norm should add it."""
    return device.type != "cuda"


class Ropes:
    """The rotary embeddings of a model, which may differ between layers."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        """Compute the frequencies of each distinct rope."""
        distinct = list(dict.fromkeys(spec.rope for spec in config.attention))
        self._of_layer = [distinct.index(spec.rope) for spec in config.attention]
        self._frequencies = [rope_frequencies(rope, config.head_dim).to(device) for rope in distinct]

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A step's angles for each layer of the checkpoint, as `rotary_angles` computes them."""
        angles = [rotary_angles(positions, each, dtype) for each in self._frequencies]
        return [angles[rope] for rope in self._of_layer]


def rope_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position for each pair of features: `[head_dim / 2]` float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _llama3_frequencies(rope, frequencies)
    return frequencies


def _llama3_frequencies(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Divide low frequencies by `factor`, keep high ones, and interpolate those between."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    kept = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies
