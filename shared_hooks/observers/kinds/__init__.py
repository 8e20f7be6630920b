"""Define the observers, and those that have a name.

activation  statistics, gradients, and a function of your own
attention   attention weights
memory      memory, non-finite values, tokens

To add an observer, write a file with an `Observer`. To make it available by name to commands and requests, add it to
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
"""Name -> factory of an observer that keeps at most so many records. It sees one forward, and its records (numbers,
short lists) travel.
"""
