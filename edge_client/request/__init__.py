"""One request: head, transport, answer; or everything on this side.

requests    begun, finished, cancelled
sending     one attempt: a place, the head, sending what crosses; several requests at a time, answers in order
edge_model  the model on this side: its heads, or all of it; with only the heads' weights in memory
ahead       what is sent before the head has ended; what was sent of frames that follow each other

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
