"""The Python client of a served model.

with Client("127.0.0.1:50051") as client:
    for chunk in client.generate("The inlay of", SamplingParams(max_tokens=32)):
        print(chunk.text, end="", flush=True)

`AsyncClient` has the same methods for programs with an event loop.
"""

from .async_client import AsyncClient
from .connection import Tls
from .messages import Asked, Chunk, Usage
from .sync_client import Client

__all__ = ["Asked", "AsyncClient", "Chunk", "Client", "Tls", "Usage"]
