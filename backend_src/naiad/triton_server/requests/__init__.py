"""Requests as clients send them → what is asked of the engine. One reader for each frontend."""
