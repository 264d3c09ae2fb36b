"""A small typed client for Naiad's text models, over gRPC streams or HTTP.

>>> from naiad_client import Client
>>> with Client("localhost:8001") as client:
...     for chunk in client.generate("The capital of France is", max_tokens=16):
...         print(chunk.text, end="")
"""

from naiad_client.client import Chunk, Client, Generation
from naiad_client.errors import ServerError
from naiad_client.wire import Message

__all__ = ["Chunk", "Client", "Generation", "Message", "ServerError"]
