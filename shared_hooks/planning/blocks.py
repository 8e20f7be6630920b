"""Other names of a cut: a module that is no layer, because it holds layers, stands for the last of them that ran; and a
name that was shortened where it was shown, as "…4.conv2", for the one layer or block that it fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def last_layer(block: str, ids: Mapping[str, int]) -> int | None:
    """The last layer inside ``block``, of ``ids`` (name -> number); None where none is in it. With "…" it is the only
    layer that it fits, or the only block; None where there are several.
    """
    before, shortened, after = block.partition("…")
    if shortened:
        for known in (list(ids), blocks(ids)):
            fits = [name for name in known if name.startswith(before) and name.endswith(after)]
            if fits:
                return ids.get(fits[0], last_layer(fits[0], ids)) if len(fits) == 1 else None
        return None
    inside = [number for name, number in ids.items() if name.startswith(f"{block}.")]
    return max(inside, default=None)


def blocks(names: Iterable[str]) -> list[str]:
    """The modules that hold these layers, in the order in which they are met."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.partition("#")[0].split(".")
        found.update(dict.fromkeys(".".join(parts[:count]) for count in range(1, len(parts))))
    return list(found)
