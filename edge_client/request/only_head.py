"""``only_head``: of a model's weights only those that heads need are in memory, the others stay in their files.

The model is whole all the same: its hash, its digests and its plans are made of every weight, read from the files on
the way and given back. What the plan's run up to the layer reads is then loaded, and every later cut is refused.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Final

from torch import nn

from shared_hooks import Plan
from shared_hooks.errors import UnknownLayer
from shared_hooks.models.mapped import MappedWeights
from shared_hooks.planning import INPUT, Loads
from shared_hooks.planning.needed import parameters_of_head

_trim: Final = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
"""glibc's: else what was freed stays with the process."""


class OnlyHead(Loads):
    """Loads one model's parameters from their files as its head needs them. The planner calls it with its lock."""

    def __init__(self, layer: int | str, model: nn.Module, weights: MappedWeights) -> None:
        self.layer = layer
        self.weights = weights
        self._model = model
        self._until: set[str] = set()  # names of layers, up to the one, on every path that is known

    @property
    def summary(self) -> str:
        """How much of the weights is in memory."""
        loaded, total = self.weights.loaded / 2**20, self.weights.total / 2**20
        return f"{loaded:.1f} of {total:.1f} MiB of the weights are in memory"

    def before_reading(self) -> None:
        self.weights.check()

    def after_plan(self, plan: Plan | None) -> None:
        try:
            if plan is not None:
                self._settle(plan)
        finally:
            self.release()

    def release(self) -> None:
        """Give back what was read of other weights, and what planning used."""
        self.weights.release()
        if _trim is not None:
            _trim(0)

    def _settle(self, plan: Plan) -> None:
        """Loads what heads need on this path, and refuses later cuts."""
        names = [info.name for info in plan.layers]
        try:
            last = plan.layer_id(self.layer)
        except UnknownLayer as error:
            if not self._until:  # nor does it run on any path so far
                for number in range(len(names)):
                    plan.refuse(number, f"no weights are loaded, for no layer {self.layer} has run")
                raise UnknownLayer(f"only_head: {error}") from error
            # on this path the last of those that come before it on another
            last = max((number for number, name in enumerate(names) if name in self._until), default=-1)
        else:
            self._until.update(names[: last + 1])
            self.layer = names[last] if last >= 0 else INPUT  # on another path it has another id
        self.weights.load(parameters_of_head(self._model, plan, last))
        for number in range(last + 1, len(names)):
            plan.refuse(number, f"only the weights up to {self.layer} are loaded")
