"""Quantised weights of a checkpoint as the numbers that they stand for.

`open_layer` finds a layer's tensors and checks them; what it returns computes rows of the weight. A file for
each format says how.
"""

from naiad.models.quantised.layers import open_layer
from naiad.models.quantised.rows import WeightRows, kept_nibbles, materialised
from naiad.models.quantised.scaled import kept_for_gpu

__all__ = ["WeightRows", "kept_for_gpu", "kept_nibbles", "materialised", "open_layer"]
