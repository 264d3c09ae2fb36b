"""Maps each family's configuration to its model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from naiad.config import ModelConfig
from naiad.config.families.gemma import GemmaConfig
from naiad.config.families.llama import LlamaConfig
from naiad.freed_memory import large_pieces_returned
from naiad.models.checkpoint_cache import CheckpointCache
from naiad.models.decoder import FamilyModel
from naiad.models.gemma import GemmaModel
from naiad.models.large_pages import LargePages
from naiad.models.llama import LlamaModel
from naiad.models.packed_weights import PackedCheckpoint, PackingCheckpoint, from_packed, packing
from naiad.models.split.checkpoint import SplitCheckpoint
from naiad.models.split.place import Place
from naiad.models.split.rank_group import RankGroup
from naiad.models.weights import Checkpoint, Weights
from naiad_kernels.linear import LoadOptions

_LOG = logging.getLogger(__name__)
_MODELS: dict[type[ModelConfig], Callable[[Any, Weights], FamilyModel]] = {
    LlamaConfig: LlamaModel,
    GemmaConfig: GemmaModel,
}


def load_model(
    directory: str,
    config: ModelConfig,
    options: LoadOptions,
    cache: CheckpointCache | None = None,
    pages: LargePages | None = None,
) -> FamilyModel:
    """Load a checkpoint.

    Args:
        directory: the checkpoint's directory.
        config: its configuration, as `ModelConfig.from_directory` reads it.
        options: dtype, device, and how linear layers are laid out.
        cache: keeps the weights of native kernels for the next start; None: nothing is kept.
        pages: the panels of native kernels that the cache has are moved there; None: they stay mapped.

    Raises:
        ModelError: names the file and the tensor that are missing, damaged or misshapen.
    """
    build: Callable[[Weights], FamilyModel] = partial(_MODELS[type(config)], config)

    def build_anew() -> FamilyModel:
        with large_pieces_returned():
            return build(Checkpoint(directory, options, config))

    if config.quantised is not None and config.quantised.unrounded:
        what = ", ".join(config.quantised.unrounded)
        how = "inputs of layers in eight bits are rounded" if options.packed else "they are not rounded"
        _LOG.info("the checkpoint is made for rounding %s: here %s", what, how)
    if cache is None or not options.native:
        return build_anew()
    # Native kernels are invariant in any case.
    options = replace(options, batch_invariant=False)

    def build_of_file(kept: PackedCheckpoint) -> FamilyModel:
        model = build(kept)
        _move(kept, pages)
        return model

    try:
        found = from_packed(cache, options, build_of_file)
        if found is not None:
            return found
        with packing(cache, options, config) as checkpoint:
            model = build(checkpoint)
        _move(checkpoint, pages)
        return model
    except OSError as error:
        _LOG.warning("the weights are not kept for the next start: %s", error)
        return build_anew()


def _move(weights: PackedCheckpoint | PackingCheckpoint, pages: LargePages | None) -> None:
    panels = weights.panels
    if pages is not None and panels is not None:
        pages.move(panels)


def load_part(
    directory: str, config: ModelConfig, options: LoadOptions, place: Place, group: RankGroup
) -> FamilyModel:
    """Load one rank's share of a checkpoint.

    Args:
        directory: the checkpoint's directory.
        config: the configuration of the whole model.
        options: dtype, device, and how linear layers are laid out.
        place: whose share.
        group: the ranks that have the others.

    Raises:
        ModelError: as `load_model`.
    """
    with large_pieces_returned():
        return _MODELS[type(config)](
            place.config(config), SplitCheckpoint(directory, options, config, place, group)
        )
