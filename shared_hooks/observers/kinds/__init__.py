"""The observers, one a file, and those of them that have a name.

activation  statistics, gradients, and a function of your own
attention   attention weights
memory      memory, non-finite values, tokens

To add an observer, write a file with an `Observer` of it. For commands and requests to have it by a name, put it into
`OBSERVERS`: command lines, servers and tables take it from there.
"""

from __future__ import annotations

from collections.abc import Callable

from shared_hooks.observers.base import Observer
from shared_hooks.observers.kinds.activation import Activation, ActivationStats, Custom, Gradient, GradientStats, Seen
from shared_hooks.observers.kinds.attention import Attention, AttentionCapture, heat_map, save_heat_map
from shared_hooks.observers.kinds.memory import (
    Memory,
    MemoryUse,
    NonFinite,
    NonFiniteFound,
    NonFiniteGuard,
    Tokens,
    TopTokens,
)

__all__ = [
    "OBSERVERS",
    "Activation",
    "ActivationStats",
    "Attention",
    "AttentionCapture",
    "Custom",
    "Gradient",
    "GradientStats",
    "Memory",
    "MemoryUse",
    "NonFinite",
    "NonFiniteFound",
    "NonFiniteGuard",
    "Seen",
    "Tokens",
    "TopTokens",
    "heat_map",
    "save_heat_map",
]

OBSERVERS: dict[str, Callable[[int], Observer]] = {
    "activation": lambda most: ActivationStats(max_records=most),
    "attention": lambda most: AttentionCapture(max_records=most, keep_weights=False, picture=True),
    "memory": lambda most: MemoryUse(max_records=most),
    "debug": lambda most: NonFiniteGuard(max_records=most, action=lambda records: None),
    "tokens": lambda most: TopTokens(max_records=most),
}
"""Name -> one that keeps so many records at most. It sees one forward; its records travel: numbers, short lists."""
