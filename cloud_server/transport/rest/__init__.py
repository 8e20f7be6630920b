"""The Open Inference Protocol by HTTP, on a port of its own (extra `rest`).

server      a thread with uvicorn in it
connections HTTP connections, each bounded while it waits for its client
application  what each path answers
pages        a folder shown under /try
messages     JSON, and tensors behind it as bytes

May import inference, access, streams, transport's waiting, guests and credentials.
"""

from cloud_server.transport.rest.server import RestServer

__all__ = [
    "RestServer",
]
