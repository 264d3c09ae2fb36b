"""Requests to the engine, outputs to their streams, and the rounds of the housekeeping thread."""
