"""The core behind gRPC.

authentication  who calls, and may this call be served? for every RPC
active_calls  calls that are served, and end when credentials no longer hold
waiting    calls that hold a thread and wait, and which of them are ended
health     the standard health service
credentials  certificates as gRPC takes them, read again when they change
server     a core on a port, and shutting down
servicer   frames between gRPC and sessions
inference_servicer  the Open Inference Protocol's messages
rest       the same protocol by HTTP

May import core, inference, access, streams, models, wire, limits.
"""

from cloud_server.transport.authentication import INFER, INFERENCE, MAX_WAITING, SERVICE, AuthInterceptor
from cloud_server.transport.server import CloudServer, Listener, check_free
from cloud_server.transport.waiting import WaitingCalls

__all__ = [
    "INFER",
    "INFERENCE",
    "MAX_WAITING",
    "SERVICE",
    "AuthInterceptor",
    "CloudServer",
    "Listener",
    "WaitingCalls",
    "check_free",
]
