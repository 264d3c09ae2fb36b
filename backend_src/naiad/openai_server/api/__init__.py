"""Bodies of the APIs as types, and their translation to and from the engine's typed request.

The modules have what all share, chats and completions; `responses` and `anthropic` turn the requests of their
APIs into chats, and write the answers in their words. `output_parser` takes outputs apart for all of them.
"""
