"""The limits of a server under siege, small enough that a minute fills them, and what it may take by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cloud_server.limits import Limits

MIB = 1 << 20

SMALL: dict[str, Any] = {
    "max_request_bytes": 16 * MIB,
    "max_pending_bytes": 128 * MIB,
    "max_message_bytes": 2 * MIB,
    "chunk_bytes": 256 << 10,
    "max_answer_bytes": 64 * MIB,
    "max_cuts_bytes": 64 * MIB,
    "max_recipes": 256,
    "max_recipe_steps": 100_000,
    "max_constant_bytes": 64 * MIB,
    "max_tail_bytes": 256 * MIB,
}
STEP_BYTES = 512
"""Bytes of a recipe's step."""
MODELS = 2
"""Each has recipes of its own."""


def parts(changed: Mapping[str, Any], workers: int = 1) -> dict[str, float]:
    """MiB that each limit lets a server take, by what it is for."""
    limits = replace(Limits(), **changed)
    found = {
        "requests": limits.max_pending_bytes,
        "answers": limits.max_answer_bytes,
        "descriptions": limits.max_cuts_bytes,
        "recipes": MODELS * STEP_BYTES * limits.max_recipe_steps,
        "tails": workers * (limits.max_tail_bytes + limits.max_constant_bytes),
        "frames": limits.max_clients * limits.max_message_bytes,
    }
    return {name: nbytes / MIB for name, nbytes in found.items()}


def most(changed: Mapping[str, Any], workers: int = 1) -> float:
    """MiB beyond what it takes at rest: the sum of its limits."""
    return sum(parts(changed, workers).values())
