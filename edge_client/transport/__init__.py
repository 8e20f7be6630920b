"""The standing connection to a server: frames out, frames in, lost and reopened.

connection     opened, lost, opened again
state, options its life; its limits
stream         one gRPC stream
outbox, inbox  what is still to be sent; what came
opening        a request that leaves while its head runs
area           or in memory that a server on this machine reads
waiting        who waits for a stream or an answer
exchange       one request and its answer on the wire
wire           protobuf messages <-> frontiers
layer_metrics  what the server measured, out of a reply
times          where the time of a request went
verdict, backoff  what a stream's end means; delays between attempts

May import protos, and of the engine crossing, metrics, lifecycle; nothing else of the client.
"""

from edge_client.transport.connection import Connection
from edge_client.transport.exchange import Exchange, Outgoing
from edge_client.transport.opening import Opening
from edge_client.transport.options import ConnectionOptions, KeepAlive, check_seconds
from edge_client.transport.state import Counters, State
from edge_client.transport.times import ServerTimes, Stamps, Times, now_ns

__all__ = [
    "Connection",
    "ConnectionOptions",
    "Counters",
    "Exchange",
    "KeepAlive",
    "Opening",
    "Outgoing",
    "ServerTimes",
    "Stamps",
    "State",
    "Times",
    "check_seconds",
    "now_ns",
]
