"""Layers folded into blocks, by their names alone: a page of 150 rows is read block by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

FEWEST: Final = 4
"""Layers that a block has on average."""


def blocks(names: Sequence[str]) -> dict[str, str]:
    """Layer -> block: its path up to a number, as far down as blocks of `FEWEST` layers on average remain.

    ``encoder.layers.3.attention.query`` is in ``encoder.layers.3``; a name without such a number is in its parent, or
    in a block of its own.
    """
    paths = {name: _numbered(name) for name in names}
    deepest = max((len(found) for found in paths.values()), default=0)
    for level in range(deepest, 0, -1):
        folded = {name: found[:level][-1] for name, found in paths.items() if found}
        if level == 1 or len(folded) >= FEWEST * len(set(folded.values())):
            return {name: folded.get(name) or _parent(name) for name in names}
    return {name: _parent(name) for name in names}


def _numbered(name: str) -> list[str]:
    """Every parent of a layer that ends in a number, the outermost first; the layer's own number is none."""
    words = _plain(name).split(".")
    return [".".join(words[: at + 1]) for at, word in enumerate(words[:-1]) if word.isdigit()]


def _parent(name: str) -> str:
    plain = _plain(name)
    return plain.rpartition(".")[0] or plain


def _plain(name: str) -> str:
    """Without the number of a later call: "relu#2" is "relu"."""
    head, mark, call = name.rpartition("#")
    return head if mark and call.isdigit() else name
