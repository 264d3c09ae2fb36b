"""How the layers of a checkpoint attend: an `AttentionSpec` for each layer, and groups of layers."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_ROPE_THETA = 10_000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        rope_type: "default", "linear" (all frequencies divided by `factor`) or "llama3" (low
            frequencies divided by `factor`, high ones kept, a ramp in between).
        theta: base of the frequencies.
        factor: for linear and llama3.
        low_freq_factor, high_freq_factor, original_max_position_embeddings: for llama3.
    """

    rope_type: str = "default"
    theta: float = DEFAULT_ROPE_THETA
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """How one layer attends.

    Attributes:
        scale: factor by which the product of a query and a key is multiplied.
        window: maximum number of tokens that each token attends to, itself included; 0: no maximum.
        soft_cap: if c > 0, scores become c · tanh(score / c); 0: scores are not capped.
        rope: how queries and keys are rotated.
    """

    scale: float
    window: int = 0
    soft_cap: float = 0.0
    rope: RopeConfig = RopeConfig()


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that need the keys and values of the same tokens.

    Attributes:
        window: as in `AttentionSpec`.
        layers: ascending indices of the layers. A model that consists of another model's first layers may
            have empty groups.
    """

    window: int
    layers: tuple[int, ...]
