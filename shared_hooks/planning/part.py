"""`OnlyPart`: of a model's weights only those that one part of it needs are in memory, the others stay in their files.

The model is whole all the same: its hash, its digests and its plans are made of every weight, read from the files on
the way and given back. What the plan's run from one cut to the other reads is then loaded.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Final

from torch import nn

from shared_hooks.errors import CutRefused, UnknownLayer
from shared_hooks.models.weights import MappedWeights
from shared_hooks.planning.plan import INPUT, Plan
from shared_hooks.planning.planner import Loads

_trim: Final = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
"""glibc's: else what was freed stays with the process."""


class OnlyPart(Loads):
    """Loads one model's parameters from their files as the part from ``first`` to ``last`` needs them: names of layers
    or blocks; None: from the beginning, or to the end. The planner calls it with its lock.

    ``refuses``: plans refuse cuts after the part's end, for heads end there.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: MappedWeights,
        first: int | str | None,
        last: int | str | None,
        *,
        refuses: bool = False,
    ) -> None:
        self.first, self.last = first, last
        self.weights = weights
        self.model = model
        self._refuses = refuses
        self._known: dict[str, None] = {}
        """Names of cuts, from the one to the other, on every path so far."""

    def __str__(self) -> str:
        begin = "" if self.first is None else f" from {self.first}"
        return f"the weights{begin}{'' if self.last is None else f' up to {self.last}'}"

    @property
    def summary(self) -> str:
        """How much of the weights is in memory."""
        loaded, total = self.weights.loaded / 2**20, self.weights.total / 2**20
        return f"{loaded:.1f} of {total:.1f} MiB of the weights are in memory"

    def check(self, begin: str, end: str | None) -> None:
        """Whether a part's weights are there: behind the cut ``begin``, up to ``end`` (None: to the model's). Raises
        CutRefused.
        """
        for name, own, what in ((begin, self.first, "begins after"), (end, self.last, "ends after")):
            if own is not None and (name is None or name not in self._known):
                said = "runs to the end" if name is None else f"{what} {name[:256]}"
                raise CutRefused(f"only {self} are loaded here, and this part {said}")

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
        """Loads what the part needs on this path."""
        names = [info.name for info in plan.cuts]
        begin = -1 if self.first is None else self._find(plan, names, self.first)[0]
        end, self.last = (len(names) - 1, None) if self.last is None else self._find(plan, names, self.last)
        if self.first is not None:
            self.first = INPUT if begin < 0 else names[begin]
            if end <= begin:
                raise CutRefused(f"only {self}: {self.last} does not come after {self.first}")
        self._known |= dict.fromkeys([*([INPUT] if begin < 0 else []), *names[max(0, begin) : end + 1]])
        last = None if self.last is None else names[end] if end >= 0 else INPUT
        self.weights.load(plan.parameters_between(names[begin] if begin >= 0 else INPUT, last, self.model))
        for name in names[end + 1 :] if self._refuses else ():
            plan.refuse(name, f"only {self} are loaded")

    def _find(self, plan: Plan, names: list[str], layer: int | str) -> tuple[int, int | str]:
        """A cut's place in ``names`` (-1: the input), and its name: on another path it has another id."""
        try:
            found = plan.resolve(layer)
        except UnknownLayer as error:
            if not self._known:  # nor does it run on any path so far
                for name in names if self._refuses else ():
                    plan.refuse(name, f"no weights are loaded, for no layer {layer} has run")
                raise UnknownLayer(f"only {self}: {error}") from error
            # on this path the last of those that come before it on another
            return max((number for number, name in enumerate(names) if name in self._known), default=-1), layer
        return (-1, INPUT) if found is None else (names.index(found.name), found.name)
