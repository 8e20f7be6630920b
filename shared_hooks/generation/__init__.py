"""Split generation: a model that is called step by step and keeps state between the calls (keys and values, recurrent
states), cut in two. Each half keeps the state that it writes; the other has shadows of it.

ghost       tensors that are elsewhere
holders     which objects hold state
forms       what the other side must know of a state
mirror      what it knows, and what has changed
changes     changes on the wire
mutators, handle   what is done to a state between steps
inputs, results, wanted, told, bank   what a step says and gives
head, tail, template   one forward: up to the cut, from the cut
session     the cloud's part of a generation
edge_session, split   the edge's part; a model whose forward is split
link        between the two
together    steps of several sessions as one
"""

from shared_hooks.generation.ghost import GhostRead
from shared_hooks.generation.holders import is_state, register_state
from shared_hooks.generation.link import InProcess, Link, StepReply
from shared_hooks.generation.records import StepRecord
from shared_hooks.generation.session import DecodingTail, TailSession
from shared_hooks.generation.split import SplitForward

__all__ = [
    "DecodingTail",
    "GhostRead",
    "InProcess",
    "Link",
    "SplitForward",
    "StepRecord",
    "StepReply",
    "TailSession",
    "is_state",
    "register_state",
]
