"""One request: head, transport, answer; or everything here.

requests   begun, finished, cancelled
edge_model the model on this side: its heads, or all of it
only_head  ... with the weights of heads alone in memory
frames     ... of frames that follow each other, what was sent
ahead      what leaves of one before its head has ended
pending    one under way, for who does not wait at once
places     room for those between head and answer, in number and bytes
many       many inputs, several under way, answers in order
window     ... how many: as few as fill the pipe
old_keywords  of `EdgeClient`, until 0.3

May import answer, witness, transport, call, modes.
"""

from edge_client.request.edge_model import Books, Cut, EdgeModel
from edge_client.request.many import Position, in_order
from edge_client.request.old_keywords import OldKeywords, taken_over
from edge_client.request.pending import Pending
from edge_client.request.requests import NOT_SERVED, Done, Requests, Running, work_of

__all__ = [
    "NOT_SERVED",
    "Books",
    "Cut",
    "Done",
    "EdgeModel",
    "OldKeywords",
    "Pending",
    "Position",
    "Requests",
    "Running",
    "in_order",
    "taken_over",
    "work_of",
]
