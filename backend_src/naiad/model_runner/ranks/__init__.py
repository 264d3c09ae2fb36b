"""The ranks of a model that is split over several processes, for tensor parallelism.

The first rank is the process of the engine: it schedules and samples. Each other one is a process of its own,
`python -m naiad.model_runner.ranks`, which gets every step as data and computes its part of the model.
"""
