"""The layers of a plan: what each is, what crosses after it, is there a cut; shown as a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, SupportsIndex, overload

from shared_hooks.recording import ModuleCall
from shared_hooks.showing import Bar, bars, folded, html_table, panel, short, size, text_table

_HEADS = ("id", "name", "type", "output", "crosses", "cut")
_NUMBERS = (0, 3, 4)
_WIDTHS = (5, 26, 16, 10, 10, 3)
_FIRST, _LAST = 12, 8
"""Rows of a terminal's table, which has to stay within `showing.MOST` characters."""


@short
@dataclass(frozen=True)
class LayerInfo:
    """One layer call. Sizes in bytes, raw; ``frontier_bytes`` crosses when the model is cut after it.

    A plan's own are made without what takes long (what crosses, whether a cut is possible and why not): that is worked
    out when somebody looks.
    """

    layer_id: int
    name: str
    layer_type: str
    output_bytes: int
    frontier_bytes: int
    can_split: bool
    # no default on the class, which would be found before `__getattr__` is asked
    reason: str = field(default_factory=str)

    @classmethod
    def on_demand(
        cls, number: int, call: ModuleCall, crossing: Callable[[int], int], refusal: Callable[[int], str]
    ) -> LayerInfo:
        """The layer of a call; ``crossing`` and ``refusal`` tell the bytes and the reason (or none) of a cut."""
        made = object.__new__(cls)
        known = {"layer_id": number, "name": call.name, "layer_type": call.module_type}
        vars(made).update(known, output_bytes=call.output_bytes, _later=(crossing, refusal))
        return made

    def __getattr__(self, name: str) -> Any:
        later = vars(self).get("_later")
        if later is None or name not in ("frontier_bytes", "can_split", "reason"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        crossing, refusal = later
        if name == "frontier_bytes":
            vars(self)[name] = crossing(self.layer_id)
        else:
            reason = refusal(self.layer_id)
            vars(self).update(reason=reason, can_split=not reason)
        return vars(self)[name]

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, one.name) for one in fields(self))


class Layers(tuple[LayerInfo, ...]):
    """Layers in the order of execution: a tuple that is shown as a table."""

    __slots__ = ()

    @overload
    def __getitem__(self, which: SupportsIndex) -> LayerInfo: ...
    @overload
    def __getitem__(self, which: slice) -> Layers: ...
    def __getitem__(self, which: SupportsIndex | slice) -> LayerInfo | Layers:
        found = super().__getitem__(which)
        return found if isinstance(found, LayerInfo) else Layers(found)

    def __repr__(self) -> str:
        above, between, below = folded(self, _FIRST, _LAST)
        rows = [*map(_row, above), *([("", f"({between} more)", "", "", "", "")] if between else []), *map(_row, below)]
        # 80 columns; why there is no cut does not fit
        narrow = [[_narrow(cell, most) for cell, most in zip(row, _WIDTHS, strict=True)] for row in rows]
        return text_table(_HEADS, narrow, _NUMBERS) if self else "Layers()"

    def _repr_html_(self) -> str:
        cuts = sum(layer.can_split for layer in self)
        title = f"{len(self)} layers, {cuts} of them can be cut after"
        told = [
            Bar(one.frontier_bytes, f"{one.layer_id} {one.name}: {size(one.frontier_bytes)}", faint=not one.can_split)
            for one in self
        ]
        most = max((layer.frontier_bytes for layer in self), default=0)
        label = f"bytes that cross after each layer, at most {size(most)}; pale: no cut there"
        return panel(title, bars(told, label), html_table(_HEADS, [_row(layer) for layer in self], _NUMBERS))


def _row(layer: LayerInfo) -> tuple[str, ...]:
    cut = "yes" if layer.can_split else f"no: {layer.reason}"
    sizes = size(layer.output_bytes), size(layer.frontier_bytes)
    return str(layer.layer_id), layer.name, layer.layer_type, *sizes, cut


def _narrow(text: str, most: int) -> str:
    if text.startswith("no: "):
        return "no"
    return text if len(text) <= most else f"…{text[1 - most :]}" if "." in text else f"{text[: most - 1]}…"
