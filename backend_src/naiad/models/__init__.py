"""The models' forward passes, one file per family, and loading of safetensors checkpoints."""

from naiad.models.decoder import DecoderModel, FamilyModel, ForwardBatch, GroupInputs
from naiad.models.registry import load_model
from naiad.models.weights import Checkpoint

__all__ = ["Checkpoint", "DecoderModel", "FamilyModel", "ForwardBatch", "GroupInputs", "load_model"]
