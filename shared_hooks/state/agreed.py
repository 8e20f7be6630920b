"""Detects changes of a model since two sides agreed that theirs are the same.

A check takes some tens of microseconds if nothing has changed. Changes that the model's own code may have made are
ignored: names that it sets, and containers that it may write to; planning and generation check those. Writes that torch
does not count (through ``data``, or NumPy's view of a tensor) are detected by a few elements of each tensor.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
import xxhash
from torch import nn

from shared_hooks.modules.attach import hooks_of
from shared_hooks.modules.constants import OF_EVERY_MODULE, is_torchs, weights_hash
from shared_hooks.state.python_state import PLAIN, PythonState, agree
from shared_hooks.state.reach import MISSING, ForwardCode, StateChange, attribute_in, held_by_code

WEIGHTS: Final = "the weights"
_TRIES: Final = 3
_VERSION: Final = operator.attrgetter("_version")
MAX_BYTES: Final = 64 << 20
"""A write to a larger tensor that is no weight counts as a change, whatever it wrote."""


class TensorSamples:
    """Three elements of each tensor in the memory of the CPU, read in place."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        found = [place for tensor in tensors for place in _places(tensor)]
        self.memories, self.places = [memory for memory, _ in found], [place for _, place in found]

    def now(self) -> list[int]:
        """Their bits."""
        return list(map(operator.getitem, self.memories, self.places))


def _places(tensor: torch.Tensor) -> Iterator[tuple[memoryview, int]]:
    """Yield the first, middle and last element: the tensor's memory as integers of the element's size, and the
    element's index in it.

    The memory stays valid while the view is kept.
    """
    size, count = tensor.element_size(), tensor.numel()
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or not count or size not in _WHOLE:
        return
    storage = tensor.untyped_storage()
    whole: Any = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes() // size * size,), (1,))
    memory = memoryview(whole.numpy()).cast(_WHOLE[size])
    for number in sorted({0, count // 2, count - 1}):
        place = int(tensor.storage_offset())
        for length, step in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
            place += number % length * step
            number //= length
        yield memory, place


_WHOLE: Final[dict[int, Any]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


class Agreed:
    """The state of a model on construction; of its weights, when `agree` is called."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._hash, self._code = model, "", ForwardCode(model)
        self._state = PythonState(model, settings=False)
        self._modules = list(model.modules())
        self._kinds = list(map(type, self._modules))
        self._hooks = {module: hooks_of(module) for module in self._modules}
        known = {id(one) for one in _weights(model)}
        others = {id(one): one for one in (*model.buffers(), *self._state.tensors()) if id(one) not in known}
        self._others = [one for one in others.values() if _is_counted(one)]
        self._digests = list(map(_digest, self._others))
        self._left: list[tuple[str, int]] = []
        self._tensors: list[torch.Tensor] = []
        self._marks: tuple[list[int], list[int]] = [], []
        self.agree("")

    def agree(self, weights: str) -> None:
        """The other side has weights with this `weights_hash`, as this one has now. Says nothing of other tensors."""
        before = dict(zip(map(id, self._tensors), zip(*self._marks, strict=True), strict=True))
        self._hash, self._weights = weights, _weights(self._model)
        self._tensors = [one for one in self._weights if _is_counted(one)] + self._others
        versions, places = self._now()
        for number in range(len(self._tensors) - len(self._others), len(self._tensors)):
            kept = before.get(id(self._tensors[number]), (versions[number], places[number]))
            versions[number], places[number] = kept
        self._marks = versions, places
        self._samples = TensorSamples(self._tensors)
        self._bits = self._samples.now()

    def _now(self) -> tuple[list[int], list[int]]:
        return list(map(_VERSION, self._tensors)), list(map(torch.Tensor.data_ptr, self._tensors))

    @property
    def is_same(self) -> bool:
        """Whether nothing has changed at all."""
        versions, places = self._marks
        return (
            list(map(_VERSION, self._tensors)) == versions
            and list(map(torch.Tensor.data_ptr, self._tensors)) == places
            and list(map(operator.getitem, self._samples.memories, self._samples.places)) == self._bits
            and list(map(type, self._modules)) == self._kinds
            and self._state.looks_same
        )

    def ran(self) -> None:
        """The model's own run has ended: what it wrote to its tensors is no change."""
        if list(map(_VERSION, self._tensors)) != self._marks[0]:
            self._digests = list(map(_digest, self._others))
            self._marks, self._bits = self._now(), self._samples.now()

    def changed(self) -> str:
        """Return the name of something that has changed, `WEIGHTS` first; "" if nothing has that affects a run."""
        for _ in range(_TRIES):
            with contextlib.suppress(RuntimeError):  # another thread changes it just now
                return self._changed()
        return ""

    def _changed(self) -> str:
        now = _weights(self._model)
        same = len(now) == len(self._weights) and all(a is b for a, b in zip(now, self._weights, strict=True))
        marks = self._now()
        count = len(self._tensors) - len(self._others)
        written = not same or [one[:count] for one in marks] != [one[:count] for one in self._marks]
        written |= self._samples.now() != self._bits
        if self._hash and written:
            if weights_hash(self._model) != self._hash:
                return WEIGHTS
            self.agree(self._hash)  # the same, in other memory
        kinds = zip(self._modules, self._kinds, strict=True)
        if other := [kind.__qualname__ for module, kind in kinds if type(module) is not kind]:
            return f"the class {other[0]}"
        changes = self._state.changes()
        names = [change.name for change in changes if self._matters(change)]
        if not names and list(map(_digest, self._others)) != self._digests:
            names = ["a tensor that the model keeps"]
        if not names:
            self._marks, self._bits = self._now(), self._samples.now()
        left = [(change.name, id(change.now)) for change in changes]
        if not names and left == self._left and not self.hooked():  # irrelevant, and it stays
            self._state, left = PythonState(self._model, settings=False), []
        self._left = left
        return min(names, default="")

    def hooked(self) -> list[nn.Module]:
        """Return the modules that have got hooks."""
        return [module for module, before in self._hooks.items() if hooks_of(module) != before]

    def _matters(self, change: StateChange) -> bool:
        if agree(change.before, change.now) or change.before is change.now is MISSING:  # order, or hooks
            return False
        if isinstance(change.before, nn.Module) or isinstance(change.now, nn.Module):
            return True
        variable, attribute = held_by_code(change.name), attribute_in(change.name)
        if attribute in OF_EVERY_MODULE or attribute.startswith("__"):
            return False
        if "[" in change.name:
            return (variable or attribute) in self._code.names - self._code.written_to
        if variable:
            return variable in self._code.names - self._code.rebound
        if change.is_attribute and is_torchs(change.kind):
            return callable(change.now) or isinstance(change.now, (*PLAIN, tuple))
        return attribute in self._code.attributes or attribute == "forward"


def _weights(model: nn.Module) -> list[Any]:
    """Parameters and persistent buffers themselves, since a state dictionary may hold copies."""
    found: list[Any] = []
    for module in model.modules():
        found += module._parameters.values()
        found += [one for name, one in module._buffers.items() if name not in module._non_persistent_buffers_set]
    return [one for one in found if one is not None]


def _is_counted(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, nn.Parameter)  # others may have no memory of their own
    return plain and tensor.layout == torch.strided and not tensor.is_inference() and not tensor.is_meta


def _digest(tensor: torch.Tensor) -> Any:
    if tensor.nbytes > MAX_BYTES or tensor.is_quantized:
        return tensor._version
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return [tensor.dtype, tensor.shape, xxhash.xxh3_64_digest(memoryview(flat.view(torch.uint8).numpy()))]  # type: ignore[arg-type]
