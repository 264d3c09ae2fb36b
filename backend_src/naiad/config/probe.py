"""The request id that `naiad serve` and the models share for probes."""

from __future__ import annotations

# The id of a request that only checks whether a model is alive. It is reserved: a client that stops
# requests of this id stops nothing.
PROBE_REQUEST_ID = "naiad-probe"
