"""Outputs of the engine → what is sent to the client. One writer for each frontend."""
