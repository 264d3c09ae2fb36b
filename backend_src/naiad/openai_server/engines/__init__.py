"""The language models that the server offers, and the generations that run on their engines."""
