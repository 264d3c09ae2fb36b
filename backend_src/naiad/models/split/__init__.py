"""A model that several ranks compute together, each with its part of every matrix.

The part of a rank is a model of the same family with fewer heads and a smaller MLP. What its row-split
projections give is summed over the ranks, so that hidden states are the same at all of them.
"""
