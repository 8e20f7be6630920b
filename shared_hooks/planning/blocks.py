"""Other names of a cut: a module that is no layer, because it holds layers, stands for the last of them that ran; and a
name that was shortened where it was shown, as "…4.conv2", for the one layer that it fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def last_layer(block: str, ids: Mapping[str, int]) -> int | None:
    """The last layer inside ``block``, of ``ids`` (name -> number), or the only one that ``block`` with "…" fits; None
    where there is none, or more than one fits.
    """
    before, shortened, after = block.partition("…")
    if shortened:
        fits = [number for name, number in ids.items() if name.startswith(before) and name.endswith(after)]
        return fits[0] if len(fits) == 1 and (before or after) else None
    inside = [number for name, number in ids.items() if name.startswith(f"{block}.")]
    return max(inside, default=None)


def blocks(names: Iterable[str]) -> list[str]:
    """The modules that hold these layers, in the order in which they are met."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.partition("#")[0].split(".")
        found.update(dict.fromkeys(".".join(parts[:count]) for count in range(1, len(parts))))
    return list(found)
