"""The request id that `naiad serve` and the models share for probes."""

from __future__ import annotations

# The id of requests that only check whether a model is alive. It is reserved: an order to stop requests of
# this id does nothing.
PROBE_REQUEST_ID = "naiad-probe"
