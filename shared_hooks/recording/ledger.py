"""The storages and values that a recording has met, distinguished by identity.

Both are remembered by weak references: planning needs the memory of a plain forward.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shared_hooks.crossing import MAX_RANK
from shared_hooks.errors import TooLarge
from shared_hooks.forward import is_mapped
from shared_hooks.recording.trace import NEVER, ModuleCall, Op, Refusal, Storage, Value
from shared_hooks.tensors import View, flatten

PRUNE = 32
MAX_TICKS = 500_000
"""What a plan keeps of one of them is a kilobyte or two."""
_POINT = View((1,), (1,), 0)


class Ledger:
    """Numbers storages and values as they appear, and knows what was there before.

    ``seq`` is the running number of the recording, ``op`` the operation and ``stack`` the module calls that are
    running.
    """

    def __init__(self, existing: list[torch.Tensor]) -> None:
        self.seq = 0
        self.started = False
        self.op: Op | None = None
        # what runs around the model's own forward (hooks on the model itself) belongs to a call of its own
        self.root = ModuleCall("", 1, "", False, None, 0)
        self.stack: list[ModuleCall] = [self.root]
        self.escaped = False
        self.foreign = -1
        self.storages: dict[int, Storage] = {}
        self.opaque: dict[int, tuple[Any, Storage]] = {}
        self.numbered = 0
        """How many storages have been seen."""
        self._alive: dict[int, StorageWeakRef] = {}
        self._prune_at = PRUNE
        self.fresh: list[Storage] = []
        self.values: list[Value] = []
        self.value_by_id: dict[int, tuple[Any, Value]] = {}
        self.unknown: list[torch.Tensor] = []
        self.appeared: list[str] = []
        self.refusals: list[Refusal] = []
        for tensor in existing:
            self.storage_of(tensor)

    def tick(self) -> int:
        self.seq += 1
        if self.seq > MAX_TICKS:
            raise TooLarge(
                f"planning met more than {MAX_TICKS} calls and operations in one forward: what it keeps of them would "
                "take too much memory. Plan a shorter input, or wrap a part of the model"
            )
        return self.seq

    def enter_inputs(self, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self.input_structure, tensors = flatten(inputs)
        for tensor in tensors:
            storage = self.storage_of(tensor, is_input=True)
            if storage.outside:
                # an input that is also a parameter: treat it as an input, it may be another one next time
                self._mark(storage, is_input=True)
        starts: dict[int, int] = {}
        ends: dict[int, int] = {}
        for tensor in tensors:
            storage = self.storage_of(tensor)
            if not storage.opaque:
                view = View.of(tensor)
                starts[storage.index] = min(starts.get(storage.index, view.offset), view.offset)
                ends[storage.index] = max(ends.get(storage.index, view.end), view.end)
        for tensor in tensors:
            storage = self.storage_of(tensor)
            if not storage.opaque and tensor.dtype.itemsize == storage.itemsize:
                # offsets of inputs count from the first element they use: a slice of a data set is not the data set
                storage.base = starts[storage.index]
                storage.elements = ends[storage.index] - starts[storage.index]
        self.inputs = [self.value_of(tensor) for tensor in tensors]
        self.started = True

    def storage_of(self, tensor: torch.Tensor, created: int | None = None, *, is_input: bool = False) -> Storage:
        """The storage of a tensor; one never seen existed before the forward unless ``created`` says otherwise."""
        try:
            if tensor.is_quantized or tensor.is_nested:
                raise NotImplementedError
            untyped = tensor.untyped_storage()
            key = untyped._cdata
            seen = self.storages.get(key)
            if seen is not None:
                return seen
            size = untyped.nbytes()
        except (RuntimeError, NotImplementedError, ValueError):
            known = self.opaque.get(id(tensor))
            if known is not None and known[0]() is tensor:
                return known[1]
            mapped = is_mapped([tensor])
            storage = Storage(self._number(), 1, tensor.dtype, str(tensor.device), created or -1, opaque=True)
            storage.outside = created is None and not mapped
            self.opaque[id(tensor)] = (weakref.ref(tensor), storage)
            return self._mark(storage, is_input)
        # a weak reference keeps the address from being used again, not the memory
        self._alive[key] = StorageWeakRef(untyped)
        if len(self._alive) > self._prune_at:
            self._prune()
        elements = size // tensor.dtype.itemsize
        storage = Storage(
            self._number(), elements, tensor.dtype, tensor.device.type, -1 if created is None else created
        )
        storage.outside = created is None
        storage.nbytes = size
        self.storages[key] = storage
        self.fresh.append(storage)
        return self._mark(storage, is_input, tensor)

    def _number(self) -> int:
        self.numbered += 1
        return self.numbered - 1

    def _prune(self) -> None:
        """Forget what is gone. Some bytes of it stay where they were while they are known, between large pieces of free
        memory that nothing fits into: the process grew by nearly all that a forward computes.
        """
        for key in [key for key, reference in self._alive.items() if reference.expired()]:
            del self._alive[key], self.storages[key]
        # a loop that keeps what each step makes would look at all of it again and again
        self._prune_at = len(self._alive) + max(PRUNE, len(self._alive) // 4)

    def _mark(self, storage: Storage, is_input: bool, tensor: torch.Tensor | None = None) -> Storage:
        if is_input:
            storage.created = storage.tainted = -1
            storage.outside, storage.born_tainted = False, True
        elif storage.outside and self.started and (self.escaped or self.op is None):
            # it did not exist before the forward and no operation made it: code out of torch's sight did, from whatever
            if self.is_constant(tensor):
                storage.outside, storage.created = False, self.seq
                return storage
            storage.tainted = self.seq
            storage.foreign = True
            if tensor is not None:
                self.unknown.append(tensor)
            if not self.escaped:
                self.foreign = self.seq
        return storage

    def is_constant(self, tensor: torch.Tensor | None) -> bool:
        """Whether a tensor that no operation made is known to hold the same bits whatever the inputs."""
        return False

    def refuse(self, reason: str, first: int = 0, last: int = NEVER) -> None:
        """No cut at a position from ``first`` to ``last``."""
        refusal = Refusal(first, last, reason)
        if refusal not in self.refusals:
            self.refusals.append(refusal)

    def span(self, tensor: torch.Tensor) -> tuple[Storage, View]:
        storage = self.storage_of(tensor)
        return storage, self.view(tensor, storage)

    @staticmethod
    def view(tensor: torch.Tensor, storage: Storage) -> View:
        if storage.opaque:
            return _POINT
        if tensor.dtype is not storage.dtype and tensor.dtype.itemsize != storage.itemsize:
            return View((storage.elements,), (1,), 0)
        return View.of(tensor, storage.base)

    def value_of(self, tensor: torch.Tensor, *, hidden: bool = False) -> Value:
        """The value a tensor object is; objects are distinguished by identity."""
        known = self.value_by_id.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        storage = self.storage_of(tensor)
        view = View.of(tensor, self._base(tensor, storage)) if not storage.opaque else View(_shape(tensor), (), 0)
        if tensor.dim() > MAX_RANK and self.started:
            self.refuse(
                f"a tensor of rank {tensor.dim()} is made; at most {MAX_RANK} dimensions cross", storage.created
            )
        flags = ("c" if tensor.is_conj() else "") + ("n" if tensor.is_neg() else "")
        made_in = self.stack[-1] if self.started else None
        if type(tensor) is not torch.Tensor and self.started and storage.tainted <= self.seq:
            self._note_class(tensor, storage)
        if storage.tainted <= self.seq and tensor.requires_grad and self.started:
            flags += "g"
        value = Value(
            len(self.values), storage, view, tensor.dtype, flags, self.seq if self.started else -1, made_in, hidden
        )
        self.values.append(value)
        self.value_by_id[id(tensor)] = (weakref.ref(tensor), value)
        return value

    def _base(self, tensor: torch.Tensor, storage: Storage) -> int:
        """Where offsets count from, in elements of this tensor's dtype."""
        if tensor.dtype.itemsize == storage.itemsize:
            return storage.base
        start = storage.base * storage.itemsize
        if storage.tainted <= self.seq and (start % tensor.dtype.itemsize or storage.nbytes % tensor.dtype.itemsize):
            self.refuse("bytes are seen as a type whose size does not divide their number", storage.created)
        return start // tensor.dtype.itemsize

    def _note_class(self, tensor: torch.Tensor, storage: Storage) -> None:
        """A tensor that has a class of its own, and depends on the inputs: the other side would see a plain one."""
        if type(tensor) is not torch.nn.Parameter and not is_mapped([tensor]):
            self.refuse(
                f"a {type(tensor).__name__}, a tensor of a class of its own, is made before it", storage.created
            )


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return () if tensor.is_nested else tuple(tensor.shape)
