"""Runs the model runner in another process, with the interface of one in the same process.

`RemoteRunner` starts `python -m naiad.model_runner.executor` and sends it steps as msgpack in frames; nothing
is pickled.
"""

from naiad.model_runner.executor.remote_runner import RemoteRunner

__all__ = ["RemoteRunner"]
