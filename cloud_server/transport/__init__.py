"""The core behind gRPC.

door       may this call be served? for every RPC
server     our service, health and reflection, and the end of it all
servicer   frames between gRPC and sessions

May import core, streams, models, wire, limits.
"""

from cloud_server.transport.server import CloudServer

__all__ = [
    "CloudServer",
]
