"""The standing connection to a server: frames out, frames in, lost and reopened.

connection  opened, lost, opened again: one gRPC stream after the other
outbox      or in memory that a server on this machine reads; a request that leaves while its head runs
exchange    one request and its answer on the wire; who waits for a stream or an answer
wire        protobuf messages <-> frontiers
times       where the time of a request went; what the server measured, out of a reply
options     The settings of a connection: limits, keep-alive, credentials. Checked when they are made
state, options its life; its limits

May import protos, and of the engine crossing, metrics, lifecycle; nothing else of the client.
"""

from edge_client.transport.connection import Connection
from edge_client.transport.exchange import Exchange, Outgoing
from edge_client.transport.options import ConnectionOptions, Counters, KeepAlive, State
from edge_client.transport.outbox import Opening
from edge_client.transport.times import ServerTimes, Stamps, Times, now_ns
from edge_client.transport.wire import Part

__all__ = [
    "Connection",
    "ConnectionOptions",
    "Counters",
    "Exchange",
    "KeepAlive",
    "Opening",
    "Outgoing",
    "Part",
    "ServerTimes",
    "Stamps",
    "State",
    "Times",
    "now_ns",
]
