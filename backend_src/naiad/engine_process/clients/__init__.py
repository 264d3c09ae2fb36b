"""The processes that use an engine: the one that owns it, those that share it, and the one that stops it."""
