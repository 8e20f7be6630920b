"""Look inside a model while it runs, on either side of a cut, without changing a bit of its answer.

base         `Observer`: looks at modules, and cannot change or break them
watching     how a forward is shown to observers
targets      which modules an observer looks at
groups       vision, audio, language ...: parts of a multimodal model
named        observers by the names that commands and requests use
activation, attention, gradients, memory, nonfinite, tokens   the observers
custom       your own function as one
transforms   a hook that may change a module's output; not an observer
values, deferred, backward   values met, numbers read later, backward hooks
texts, pictures, thumbnails  tokens as text; attention as pictures

from shared_hooks.observers import ActivationStats

with ActivationStats("layer1.*").attach(model_or_wrapped) as stats:
    model_or_wrapped(x)
for record in stats.records:
    print(record.name, record.step, record.mean)
"""

from shared_hooks.observers.activation import Activation, ActivationStats
from shared_hooks.observers.attention import Attention, AttentionCapture
from shared_hooks.observers.base import Attachment, Observer, Record
from shared_hooks.observers.custom import Custom, Seen
from shared_hooks.observers.deferred import Deferred
from shared_hooks.observers.gradients import Gradient, GradientStats
from shared_hooks.observers.memory import Memory, MemoryUse
from shared_hooks.observers.nonfinite import NonFinite, NonFiniteFound, NonFiniteGuard
from shared_hooks.observers.pictures import heat_map, save_heat_map
from shared_hooks.observers.tokens import Tokens, TopTokens
from shared_hooks.observers.transforms import Changed, Transform
from shared_hooks.observers.watching import Call

__all__ = [
    "Activation",
    "ActivationStats",
    "Attachment",
    "Attention",
    "AttentionCapture",
    "Call",
    "Changed",
    "Custom",
    "Deferred",
    "Gradient",
    "GradientStats",
    "Memory",
    "MemoryUse",
    "NonFinite",
    "NonFiniteFound",
    "NonFiniteGuard",
    "Observer",
    "Record",
    "Seen",
    "Tokens",
    "TopTokens",
    "Transform",
    "heat_map",
    "save_heat_map",
]
