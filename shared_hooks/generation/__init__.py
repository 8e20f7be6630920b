"""Split generation: a model that is called step by step and keeps state between the calls (keys and values, recurrent
states), cut in two. Each half keeps the state that it writes; the other has shadows of it.

remote_tensor  tensors that are on the other side
holders     which objects hold state
forms       what the other side must know of a state
mirror      what it knows, and what has changed
changes     changes on the wire
mutators    methods of a state, called on both sides
handle      what a session leaves on a state
inputs      what a step is given
results     what it gives
wanted      how much of the logits comes back
sampling    the tail samples as the edge would
asking      and so asks for
bank        values that Python reads from data before the cut
call_reports  what calls before the cut gave
surroundings  autocast, training, hooks: what is around a step
settled     does the model keep more than its state objects between calls?
cut         where the model is cut
head        one forward up to the cut
template    how the tail treats calls before the cut
tail        one forward from the cut
allowance   how much memory one step may take
hidden      codecs for hidden states
session     the cloud's part of a generation
link        between the two
edge_session  the edge's part
split       a model whose forward is split
together    steps of several sessions as one
"""

from shared_hooks.generation.asking import Need, needed
from shared_hooks.generation.holders import is_state, register_state
from shared_hooks.generation.link import InProcess, Link, StepReply
from shared_hooks.generation.remote_tensor import RemoteRead
from shared_hooks.generation.session import DecodingSession, DecodingTail
from shared_hooks.generation.split import SplitForward, StepRecord

__all__ = [
    "DecodingSession",
    "DecodingTail",
    "InProcess",
    "Link",
    "Need",
    "RemoteRead",
    "SplitForward",
    "StepRecord",
    "StepReply",
    "is_state",
    "needed",
    "register_state",
]
