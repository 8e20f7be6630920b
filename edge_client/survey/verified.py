"""Every cut through the real link: is the answer the whole model's, as this side computes it and as the server does?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from edge_client.client import EdgeClient
from edge_client.modes import EDGE_ONLY
from edge_client.witness import Comparison, compare, tolerance_between
from shared_hooks.errors import AccessRefused, CutRefused, IsthmusError
from shared_hooks.modules import holder_modules
from shared_hooks.showing import short
from shared_hooks.tensors import classes_of, flatten

WHOLE_THERE = "input"
"""The cut before the first layer: the server computes everything."""


@short
@dataclass(frozen=True)
class CutVerdict:
    """One cut. ``here`` and ``there``: against the whole model on this side and on the server; None where there was no
    answer, and ``reason`` says why. ``refused``: as it should be, before anything was sent.
    """

    layer_id: int
    name: str
    here: Comparison | None
    there: Comparison | None
    refused: bool = False
    reason: str = ""

    @property
    def is_exact(self) -> bool:
        """Every bit is that of one side's whole model."""
        return any(one is not None and one.bits for one in (self.here, self.there))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"exact": self.is_exact}


@short
@dataclass(frozen=True)
class Verified:
    """``sides``: the whole model on the server against the whole model here, None where the cut ``input`` is refused;
    ``unlike``: why the two machines may differ in the last bits, none where they are alike.
    """

    cuts: tuple[CutVerdict, ...]
    sides: Comparison | None
    unlike: tuple[str, ...]
    limit: float
    """The largest difference that may be between these two machines; 0 where they are alike."""
    notes: tuple[str, ...] = ()
    """What the models differ in without any effect on results."""

    @property
    def answered(self) -> list[CutVerdict]:
        return [one for one in self.cuts if one.here is not None]

    @property
    def wrong(self) -> list[CutVerdict]:
        """Cuts with no answer that should have one, and answers too far from both sides."""
        return [one for one in self.cuts if not one.refused and not self._passes(one)]

    @property
    def ok(self) -> bool:
        """The two sides compute the same model, as far as their machines allow, and so does every cut between them."""
        return (self.sides is None or self.sides.within(self.limit)) and not self.wrong

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "sides": None if self.sides is None else asdict(self.sides),
            "unlike": list(self.unlike),
            "limit": self.limit,
            "largest": self.largest,
            "notes": list(self.notes),
            "top1": self.top1,
            "cuts": [one.as_dict() for one in self.cuts],
        }

    def _passes(self, one: CutVerdict) -> bool:
        return one.is_exact or any(each is not None and each.within(self.limit) for each in (one.here, one.there))

    @property
    def largest(self) -> float:
        """The largest difference of the answers from the whole model here, in units of the output's scale."""
        return max((one.here.largest for one in self.answered if one.here is not None), default=0.0)

    @property
    def top1(self) -> float | None:
        """The least share of rows with the same largest value; None for outputs without such rows."""
        shares = [one.here.top1 for one in self.answered if one.here is not None and one.here.top1 is not None]
        return min(shares, default=None)


def verified(
    client: EdgeClient,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    on_cut: Callable[[int, int], None] = lambda done, total: None,
) -> Verified:
    """Asks for each cut once. Raises what the first request raises; later failures are verdicts."""
    client.open()
    model = client.wrapped.model
    find = classes_of(holder_modules(model))
    here = client.infer(*args, **kwargs, split=EDGE_ONLY).output
    try:
        there, has_there = client.infer(*args, **kwargs, split=WHOLE_THERE).output, True
    except (CutRefused, AccessRefused):
        there, has_there = None, False
    about = client.server_about
    apart = client.unlike
    formats = {tensor.dtype for tensor in (*model.parameters(), *flatten(here)[1])}
    limit = tolerance_between(formats, about, client.device) if apart else 0.0
    layers = [(-1, WHOLE_THERE), *((layer.layer_id, layer.name) for layer in client.wrapped.layers)]

    def all_of_them() -> Iterator[CutVerdict]:
        for number, (layer_id, name) in enumerate(layers):
            try:
                answer = client.infer(*args, **kwargs, split=layer_id if layer_id >= 0 else name)
                from_there = compare(there, answer.output, find) if has_there else None
                yield CutVerdict(layer_id, name, compare(here, answer.output, find), from_there)
            except (CutRefused, AccessRefused) as error:
                yield CutVerdict(layer_id, name, None, None, True, str(error))
            except IsthmusError as error:
                yield CutVerdict(layer_id, name, None, None, False, f"{type(error).__name__}: {error}")
            on_cut(number + 1, len(layers))

    cuts = tuple(all_of_them())
    return Verified(cuts, compare(here, there, find) if has_there else None, apart, limit, client.notes)
