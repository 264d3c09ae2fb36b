"""The model runner in another process, behind the protocol of one in the same process.

`RemoteRunner` starts `python -m naiad.model_runner.executor` and sends it steps as msgpack in frames; nothing
is pickled. Ranks of a model that is split over several devices would stand here too.
"""

from naiad.model_runner.executor.remote_runner import RemoteRunner

__all__ = ["RemoteRunner"]
