"""`OnlyPart`: only those of a model's weights that one part of it needs are in memory; the others stay in their files.

The model is still complete: its hash, its digests and its plans are made of every weight, read from the files and
released again. What the plan's run from one cut to the other reads is then loaded to the part's device. A run of the
whole model copies the others there, for one operation at a time.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from shared_hooks.devices import CPU, is_host
from shared_hooks.errors import CutRefused, UnknownLayer
from shared_hooks.models.weights import MappedWeights
from shared_hooks.modules import INPUT
from shared_hooks.planning.plan import Plan
from shared_hooks.planning.planner import Loads

_trim: Final = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
"""glibc's malloc_trim, without which freed memory stays with the process."""


NEAR: Final = 0.1
"""Among cuts whose parts differ by at most this share of equal weights, the one where the least crosses is used."""


def _other_names(plan: Plan, names: Sequence[str]) -> list[str]:
    """Modules that end with one of these cuts, and so are the same cut."""
    wanted, found = frozenset(names), []
    for path in dict.fromkeys(call.path for call in plan.trace.calls):
        with suppress(UnknownLayer):
            info = plan.resolve(path)
            if info is not None and info.name != path and info.name in wanted:
                found.append(path)
    return found


class _Bringing(TorchDispatchMode):
    """Copies to ``device`` what an operation reads from the CPU's memory. What it writes to stays where it is, because
    a write to a copy would be lost.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, there = kwargs or {}, self._device.type
        given: list[torch.Tensor] = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if any(one.device.type == there for one in given) and any(_is_weight(one) for one in given):
            parameters = func._schema.arguments
            written = {one.name for one in parameters if one.alias_info is not None and one.alias_info.is_write}
            named = zip((one.name for one in parameters), args, strict=False)
            args = [value if name in written else self._brought(value) for name, value in named]
            kwargs = {name: value if name in written else self._brought(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)

    def _brought(self, value: Any) -> Any:
        return tree_map(lambda one: one.to(self._device) if _is_weight(one) else one, value)


def _is_weight(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim() > 0


class OnlyPart(Loads):
    """Loads one model's parameters from their files as the part from ``first`` to ``last`` needs them: names of layers
    or blocks; None: from the beginning, or to the end. The planner calls it with its lock.

    ``refuses``: plans refuse cuts after the part's end, because heads end there.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: MappedWeights,
        first: int | str | None,
        last: int | str | None,
        *,
        refuses: bool = False,
        device: torch.device = CPU,
        share: tuple[int, int] | None = None,
    ) -> None:
        """``share``: (the number of a part from 0, the number of parts of equal weights), instead of ``first`` and
        ``last``.
        """
        self.first, self.last = first, last
        self._share = share
        self.device = device
        if not is_host(device):
            weights.place(device)
        self.weights = weights
        self.model = model
        self._refuses = refuses
        self._known: dict[str, None] = {}
        """Names of cuts between the two, on every path so far."""

    def __str__(self) -> str:
        begin = "" if self.first is None else f" from {self.first}"
        return f"the weights{begin}{'' if self.last is None else f' up to {self.last}'}"

    @property
    def summary(self) -> str:
        """How much of the weights is in memory, as text."""
        loaded, total = self.weights.loaded / 2**20, self.weights.total / 2**20
        return f"{loaded:.1f} of {total:.1f} MiB of the weights are in memory"

    def check(self, begin: str, end: str | None) -> None:
        """Check that a part's weights are there: behind the cut ``begin``, up to ``end`` (None: the model's end).
        Raises CutRefused.
        """
        for name, own, what in ((begin, self.first, "begins after"), (end, self.last, "ends after")):
            if own is not None and (name is None or name not in self._known):
                reported = "runs to the end" if name is None else f"{what} {name[:256]}"
                raise CutRefused(f"only {self} are loaded here, and this part {reported}")

    @property
    def names(self) -> tuple[str, ...]:
        """The cuts at which it may begin and end, in order."""
        return tuple(self._known)

    def again(self, model: nn.Module, weights: MappedWeights) -> nn.Module:
        """Return the same model, newly built, with the weights of this part where they are here: on the CPU in their
        files.
        """
        if not is_host(self.device):
            weights.place(self.device)
            pairs = zip(self.model.parameters(), model.parameters(), strict=True)
            weights.load(other for own, other in pairs if self.weights.is_loaded(own))
        return model

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A context around what may need all weights. Raises SpecError if a file has changed."""
        self.weights.check()
        try:
            with self.bringing():
                yield
        finally:
            self.release()

    def bringing(self) -> AbstractContextManager[object]:
        """Return a context around a run that may need weights of other parts: an accelerator gets copies as they are
        read.
        """
        return nullcontext() if is_host(self.device) else _Bringing(self.device)

    def release(self) -> None:
        """Release what was read of other weights, and what planning used."""
        self.weights.release()
        if _trim is not None:
            _trim(0)

    def planned(self, plan: Plan) -> None:
        """Load what the part needs on this path."""
        names = [info.name for info in plan.cuts]
        if self._share is not None:
            self.first, self.last = self._shared(plan, *self._share)
            self._share = None
        begin = -1 if self.first is None else self._find(plan, names, self.first)[0]
        end, self.last = (len(names) - 1, None) if self.last is None else self._find(plan, names, self.last)
        if self.first is not None:
            self.first = INPUT if begin < 0 else names[begin]
            if end <= begin:
                raise CutRefused(f"only {self}: {self.last} does not come after {self.first}")
        within = [*([INPUT] if begin < 0 else []), *names[max(0, begin) : end + 1]]
        also = _other_names(plan, within)
        self._known |= dict.fromkeys(within[:1] + also + within[1:])
        last = None if self.last is None else names[end] if end >= 0 else INPUT
        self.weights.load(plan.parameters_between(names[begin] if begin >= 0 else INPUT, last, self.model))
        for name in names[end + 1 :] if self._refuses else ():
            plan.refuse(name, f"only {self} are loaded")

    def _shared(self, plan: Plan, number: int, count: int) -> tuple[str, str | None]:
        """Begin and end of one of ``count`` parts of about equal weights, at cuts where little crosses. Raises
        CutRefused.
        """
        cuts = [info for info in plan.cuts if info.can_split]
        listed = {name for name, module in self.model.named_modules() if isinstance(module, nn.ModuleList)}
        blocks = [info for info in cuts if info.name.rpartition(".")[0] in listed]
        cuts = cuts if len(blocks) < count else blocks  # generations leave only after those
        sizes = {id(parameter): parameter.nbytes for parameter in self.model.parameters()}
        total, ends, begin = sum(sizes.values()), [INPUT], 0
        upto = [sum(sizes[id(one)] for one in plan.parameters_between(INPUT, info.name, self.model)) for info in cuts]
        for part in range(1, count):
            wanted, step = total * part / count, total / count * NEAR
            found = [at for at in range(begin, len(cuts)) if abs(upto[at] - wanted) <= total / count / 2]
            if not found:
                raise CutRefused(f"parts: no {count} parts of about equal weights: name the cuts between them")
            best = min(found, key=lambda at: (abs(upto[at] - wanted) // step, plan.frontier_bytes(cuts[at].name)))
            ends.append(cuts[best].name)
            begin = best + 1
        return ends[number], ends[number + 1] if number + 1 < count else None

    def _find(self, plan: Plan, names: list[str], layer: int | str) -> tuple[int, int | str]:
        """Return a cut's place in ``names`` (-1: the input), and its name: on another path it has another id."""
        try:
            found = plan.resolve(layer)
        except UnknownLayer as error:
            if not self._known:  # nor does it run on any known path
                for name in names if self._refuses else ():
                    plan.refuse(name, f"no weights are loaded, for no layer {layer} has run")
                raise UnknownLayer(f"only {self}: {error}") from error
            # on this path the last of those that come before it on another
            return max((number for number, name in enumerate(names) if name in self._known), default=-1), layer
        return (-1, INPUT) if found is None else (names.index(found.name), found.name)
