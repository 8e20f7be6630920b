"""The core behind gRPC.

authentication      the identity and permission of a caller, for every RPC
active_calls        calls in progress, and calls that wait, each of which holds a thread
server              a core on a port, its health, and shutting down
servicer            frames between gRPC and sessions
rest                the same protocol over HTTP

May import core, inference, access, streams, models, wire, limits.
"""

from cloud_server.transport.active_calls import WaitingCalls
from cloud_server.transport.authentication import INFER, INFERENCE, MAX_WAITING, SERVICE, AuthInterceptor
from cloud_server.transport.server import CloudServer, GrpcListener, check_free

__all__ = [
    "INFER",
    "INFERENCE",
    "MAX_WAITING",
    "SERVICE",
    "AuthInterceptor",
    "CloudServer",
    "GrpcListener",
    "WaitingCalls",
    "check_free",
]
