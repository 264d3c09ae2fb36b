"""What `naiad serve` and the models agree on about probes."""

from __future__ import annotations

# The id of a request that only asks whether a model lives. Reserved: a client that stops requests
# of this id stops nothing.
PROBE_REQUEST_ID = "naiad-probe"
