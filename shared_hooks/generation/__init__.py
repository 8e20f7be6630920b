"""Split generation: a model that is called step by step and keeps state between the calls (keys and values, recurrent
states), cut in two. Each half keeps the state that it writes; the other has shadows of it.

remote_tensor  tensors that are on the other side
hidden         codecs for hidden states, and what holds them
inputs         what a step is given, and what the other side must know of a state
mirror         what it knows, and what has changed
results        what it gives: all of it, or what was asked for
asking         what calls before the cut gave, and what is asked of the other side
bank           values that Python reads from data before the cut
cut            where the model is cut; autocast, training, hooks: what is around a step
head           one forward up to the cut
tail           one forward from the cut
session        the cloud's part of a generation
edge_session   the edge's part, and its way to the cloud's
ahead          steps that are sent while earlier ones are under way
split          a model whose forward is split
middle         a server's part in a chain: from one cut to a later one
together       steps of several sessions as one
gates          ... where they meet: modules that are row-wise, blocks with a cache
"""

from shared_hooks.generation.asking import Need, needed
from shared_hooks.generation.edge_session import EdgeLink, InProcess, StepLink, StepReply
from shared_hooks.generation.hidden import is_state, register_state, state_in, state_name
from shared_hooks.generation.middle import MiddleDecodingSession
from shared_hooks.generation.remote_tensor import RemoteRead
from shared_hooks.generation.session import DecodingSession, DecodingTail
from shared_hooks.generation.split import SplitForward, StepRecord

__all__ = [
    "DecodingSession",
    "DecodingTail",
    "EdgeLink",
    "InProcess",
    "MiddleDecodingSession",
    "Need",
    "RemoteRead",
    "SplitForward",
    "StepLink",
    "StepRecord",
    "StepReply",
    "is_state",
    "needed",
    "register_state",
    "state_in",
    "state_name",
]
