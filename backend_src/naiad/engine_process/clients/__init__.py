"""Clients of an engine process: its owner, other models that use it, and `StopNotice`."""
