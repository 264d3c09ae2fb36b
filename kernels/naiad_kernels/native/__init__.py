"""A model's step on a CPU in one call: recorded once, run by native kernels.

A tape is what a model's forward pass does, as a list of records; the kernels in `src` run it with one team
of threads and without Python in between. docs/native.md explains layouts and orders.
"""

from __future__ import annotations
