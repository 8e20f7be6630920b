"""Observe a model while it runs, on either side of a cut, without changing a bit of its answer.

base        `Observer`: looks at modules without changing or breaking them
watching    how observers see a forward
named       observers by the names that commands and requests use
kinds       the observers: activation, attention, gradients, memory, non-finite values, tokens, a function of your own
transforms  a hook that may change a module's output; not an observer
thumbnails  attention pictures small enough to travel; tokens as text

from shared_hooks.observers import ActivationStats

with ActivationStats("layer1.*").attach(model_or_wrapped) as stats:
    model_or_wrapped(x)
for record in stats.records:
    print(record.name, record.step, record.mean)
"""

from shared_hooks.observers.base import Attachment, Observer, Record
from shared_hooks.observers.kinds import (
    Activation,
    ActivationStats,
    Attention,
    AttentionCapture,
    Custom,
    Gradient,
    GradientStats,
    Memory,
    MemoryUse,
    NonFinite,
    NonFiniteFound,
    NonFiniteGuard,
    Seen,
    Tokens,
    TopTokens,
    heat_map,
    save_heat_map,
)
from shared_hooks.observers.transforms import Changed, Transform
from shared_hooks.observers.watching import Deferred, ObservedCall

__all__ = [
    "Activation",
    "ActivationStats",
    "Attachment",
    "Attention",
    "AttentionCapture",
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
    "ObservedCall",
    "Observer",
    "Record",
    "Seen",
    "Tokens",
    "TopTokens",
    "Transform",
    "heat_map",
    "save_heat_map",
]
