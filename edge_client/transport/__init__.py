"""The connection to a server: frames out, frames in, reopened when it is lost.

connection  opened, lost, opened again: one gRPC stream after the other
outbox      what a stream has to send, possibly in memory that a server on this machine reads
exchange    one request and its answer on the wire; the requests that wait for a stream or an answer
wire        protobuf messages <-> frontiers
times       where the time of a request went; what the server measured, from a reply
options     the settings of a connection: limits, keep-alive, credentials

May import protos, and of the engine crossing, metrics, lifecycle; nothing else of the client.
"""

from edge_client.transport.connection import Connection
from edge_client.transport.exchange import Exchange, Outgoing
from edge_client.transport.options import ConnectionOptions, Counters, KeepAlive, State
from edge_client.transport.outbox import Opening
from edge_client.transport.times import ServerTimes, Stamps, Times, now_ns
from edge_client.transport.wire import PartReport

__all__ = [
    "Connection",
    "ConnectionOptions",
    "Counters",
    "Exchange",
    "KeepAlive",
    "Opening",
    "Outgoing",
    "PartReport",
    "ServerTimes",
    "Stamps",
    "State",
    "Times",
    "now_ns",
]
