"""A module that is no layer, because it holds layers, as a cut: after the last of them that ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def last_layer(block: str, ids: Mapping[str, int]) -> int | None:
    """The last layer inside ``block``, of ``ids`` (name -> number); None where none is in it."""
    inside = [number for name, number in ids.items() if name.startswith(f"{block}.")]
    return max(inside, default=None)


def blocks(names: Iterable[str]) -> list[str]:
    """The modules that hold these layers, in the order in which they are met."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.partition("#")[0].split(".")
        found.update(dict.fromkeys(".".join(parts[:count]) for count in range(1, len(parts))))
    return list(found)
