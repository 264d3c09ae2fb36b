"""Clients of an engine process: its owner, the other models that use it, and the one that stops it."""
