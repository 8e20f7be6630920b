"""The Open Inference Protocol over HTTP, on a port of its own (extra `rest`).

server       a thread that runs uvicorn
connections  HTTP connections, each with a time limit while it waits for its client
application  the answer of each path
pages        a folder served under /try
messages     JSON, and tensors as bytes after it

May import inference, access, streams, transport's active calls and credentials.
"""

from cloud_server.transport.rest.server import RestServer

__all__ = [
    "RestServer",
]
