"""Readers, one for each frontend: they turn a client's request into the typed request."""
