"""Sends requests to the engine and outputs to their streams; housekeeping and watching clients."""
