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
from shared_hooks.planning import Loads
from shared_hooks.planning.needed import parameters_of_head


_trim: Final = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
"""glibc's: else what was freed stays with the process."""


class OnlyHead(Loads):
    """Of one model, whose parameters are all left in their files at first. The planner calls it with its lock."""

    def __init__(self, layer: int | str, model: nn.Module, weights: MappedWeights) -> None:
        self.layer = layer
        self.weights = weights
        self._model = model
        anchor = next(model.parameters())
        self._device = anchor.device
        weights.load([anchor], self._device)  # it tells on which device the model is
        self._known = False

    @property
    def told(self) -> str:
        """How much of the weights is in memory."""
        loaded, total = self.weights.loaded / 2**20, self.weights.total / 2**20
        return f"{loaded:.1f} of {total:.1f} MiB of the weights are in memory"

    def before_plan(self) -> None:
        self.weights.bring(self._device)

    def after_plan(self, plan: Plan | None) -> None:
        try:
            if plan is not None:
                self._settle(plan)
        finally:
            self.release()

    def release(self) -> None:
        """Give back what was read of other weights, and what planning used."""
        self.weights.release(self._device)
        if _trim is not None:
            _trim(0)

    def _settle(self, plan: Plan) -> None:
        """Loads what heads need on this path, and refuses later cuts."""
        try:
            last = plan.layer_id(self.layer)
        except UnknownLayer:
            for info in plan.layers:
                plan.refuse(info.layer_id, f"{self.layer}, up to which weights are loaded, does not run here")
            if not self._known and not self._is_module:
                raise
            return
        if last >= 0:
            self.layer = plan.layers[last].name  # on another path it has another id
        self._known = True
        self.weights.load(parameters_of_head(self._model, plan, last), self._device)
        for info in plan.layers[last + 1 :]:
            plan.refuse(info.layer_id, f"only the weights up to {self.layer} are loaded")

    @property
    def _is_module(self) -> bool:
        """Whether the layer is a leaf of this model, which another input may run."""
        path = str(self.layer).partition("#")[0]
        return any(name == path and not list(module.children()) for name, module in self._model.named_modules())
