"""One request: head, transport, answer; or everything here.

requests   begun, finished, cancelled
sending     one attempt: a place, the head, the frontier goes; of many several under way, answers in order
edge_model  the model on this side: its heads, or all of it; with the weights of heads alone in memory
ahead       what leaves of one before its head has ended; of frames that follow each other, what was sent

May import answer, witness, transport, call, modes.
"""

from edge_client.request.edge_model import Books, Cut, EdgeModel
from edge_client.request.requests import Requests
from edge_client.request.sending import (
    NOT_SERVED,
    Done,
    Pending,
    Position,
    Route,
    Running,
    closing_with,
    in_order,
    work_of,
)

__all__ = [
    "NOT_SERVED",
    "Books",
    "Cut",
    "Done",
    "EdgeModel",
    "Pending",
    "Position",
    "Requests",
    "Route",
    "Running",
    "closing_with",
    "in_order",
    "work_of",
]
