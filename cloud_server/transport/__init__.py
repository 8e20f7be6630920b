"""The core behind gRPC.

door       may this call be served? for every RPC
server     our service, health and reflection, and shutting down
port       is the address free? before the models are loaded
servicer   frames between gRPC and sessions

May import core, streams, models, wire, limits.
"""

from cloud_server.transport.port import check_free
from cloud_server.transport.server import CloudServer

__all__ = [
    "CloudServer",
    "check_free",
]
