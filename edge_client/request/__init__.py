"""One request: head, transport, answer; or everything here.

requests   begun, finished, cancelled
half       this side's part of the model
many       many inputs, several under way, answers in order
old_keywords  of `EdgeClient`, until 0.3

May import answer, witness, transport, call, modes.
"""

from edge_client.request.half import Cut, EdgeHalf
from edge_client.request.many import Place, in_order
from edge_client.request.old_keywords import OldKeywords, taken_over
from edge_client.request.requests import Done, Requests, Running, work_of

__all__ = [
    "Cut",
    "Done",
    "EdgeHalf",
    "OldKeywords",
    "Place",
    "Requests",
    "Running",
    "in_order",
    "taken_over",
    "work_of",
]
