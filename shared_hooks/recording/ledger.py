"""The storages and values of a recording, and memory of the model that code outside torch has access to.

Storages and values are identified by identity and referenced weakly: planning needs the memory of a plain forward.

What code outside torch writes (through NumPy views, raw pointers, storages) leaves no event. So during a recording the
bytes of every parameter, buffer or other constant that was handed out are compared with their previous ones, at each
step; and where tensors come from outside torch, their bytes are recorded, so that recordings with other inputs
distinguish a constant table from a result.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch.multiprocessing.reductions import StorageWeakRef

from shared_hooks.crossing import MAX_RANK
from shared_hooks.errors import TooLarge
from shared_hooks.forward import is_mapped
from shared_hooks.recording.trace import NEVER, DataEvent, ModuleCall, Op, Refusal, Storage, Value
from shared_hooks.tensors import LiveSet, View, bytes_of, flatten

PRUNE = 32
MAX_TICKS = 500_000
"""For each of them a plan keeps a kilobyte or two."""
_POINT = View((1,), (1,), 0)


class Ledger:
    """Numbers storages and values as they appear, and knows what existed before.

    ``seq``: the running number of the recording, ``op``: the current operation, ``stack``: the module calls in
    progress.
    """

    def __init__(self, existing: list[torch.Tensor]) -> None:
        self.seq = 0
        self.started = False
        self.op: Op | None = None
        # code around the model's own forward (hooks on the model itself) belongs to a call of its own
        self.root = ModuleCall("", 1, "", False, None, 0)
        self.stack: list[ModuleCall] = [self.root]
        self.escaped = False
        self.foreign = -1
        self.storages: dict[int, Storage] = {}
        self.opaque: dict[int, tuple[Any, Storage]] = {}
        self.numbered = 0
        """The number of storages seen."""
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
                # an input that is also a parameter: treated as an input, it may be another one next time
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
        """Return the storage of a tensor; an unknown one existed before the forward unless ``created`` is given."""
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
        # a weak reference keeps the address from being reused, not the memory
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
        """Forget what was freed. While it is known, some of its bytes stay allocated between large pieces of free
        memory that nothing fits into: the process grew by nearly all that a forward computes.
        """
        for key in [key for key, reference in self._alive.items() if reference.expired()]:
            del self._alive[key], self.storages[key]
        # a loop that keeps the results of each step would check all of them again and again
        self._prune_at = len(self._alive) + max(PRUNE, len(self._alive) // 4)

    def _mark(self, storage: Storage, is_input: bool, tensor: torch.Tensor | None = None) -> Storage:
        if is_input:
            storage.created = storage.tainted = -1
            storage.outside, storage.born_tainted = False, True
        elif storage.outside and self.started and (self.escaped or self.op is None):
            # it did not exist before the forward and no operation made it: it was made by code outside of torch, from
            # unknown sources
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
        """Return whether a tensor that no operation created is known to hold the same bits for all inputs."""
        return False

    def refuse(self, reason: str, first: int = 0, last: int = NEVER) -> None:
        """Refuse cuts at positions from ``first`` to ``last``."""
        refusal = Refusal(first, last, reason)
        if refusal not in self.refusals:
            self.refusals.append(refusal)

    def span(self, tensor: torch.Tensor) -> tuple[Storage, View]:
        storage = self.storage_of(tensor)
        return storage, self.view(tensor, storage)

    @staticmethod
    def is_exact(tensor: torch.Tensor, storage: Storage) -> bool:
        """Return whether `view` covers exactly what the tensor shows: for elements of another size it covers the whole
        storage.
        """
        size = tensor.dtype.itemsize
        if size == storage.itemsize or storage.opaque:
            return True
        return tensor.is_contiguous() and tensor.numel() * size == storage.elements * storage.itemsize

    @staticmethod
    def view(tensor: torch.Tensor, storage: Storage) -> View:
        if storage.opaque:
            return _POINT
        if tensor.dtype is not storage.dtype and tensor.dtype.itemsize != storage.itemsize:
            return View((storage.elements,), (1,), 0)
        return View.of(tensor, storage.base)

    def value_of(self, tensor: torch.Tensor, *, hidden: bool = False) -> Value:
        """Return the value that a tensor object is, by identity."""
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
        """Return the origin of offsets, in elements of this tensor's dtype."""
        if tensor.dtype.itemsize == storage.itemsize:
            return storage.base
        start = storage.base * storage.itemsize
        if storage.tainted <= self.seq and (start % tensor.dtype.itemsize or storage.nbytes % tensor.dtype.itemsize):
            self.refuse("bytes are seen as a type whose size does not divide their number", storage.created)
        return start // tensor.dtype.itemsize

    def _note_class(self, tensor: torch.Tensor, storage: Storage) -> None:
        """Refuse a tensor of a class of its own that depends on the inputs: the other side would see a plain one."""
        if type(tensor) is not torch.nn.Parameter and not is_mapped([tensor]):
            self.refuse(
                f"a {type(tensor).__name__}, a tensor of a class of its own, is made before it", storage.created
            )


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return () if tensor.is_nested else tuple(tensor.shape)


# Pauses Python's garbage collector while very many objects are made that all stay.
#
# A recording makes some dozen small objects an operation. The collector scans the young ones again and again, and now
# and then every object of the process, to find that nothing can be freed: half of the time of planning.


@contextmanager
def put_off() -> Iterator[None]:
    """No garbage collection in the block. With several threads, the first to leave ends it."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# What a forward leaves in memory that outlives it: parameters, buffers, tensors kept in attributes or globals.
#
# A tail must leave the server's memory as it was, so a cut is refused if its tail contains such a write, whether
# after the cut or in the part of the prefix that the tail's Python repeats. And where a written value depends on the
# inputs and is read by the next forward, the model carries state from request to request, which a cut would keep on
# one side only.
#
# A *scratch* storage is rewritten before it is read. The tail's side does not have the head's values there: a path
# that reads first must not be cut, and where data decide on the path it is unknown which one comes.


def outside_writes(events: list[DataEvent], *, timeless: bool) -> Iterator[tuple[Storage, int, int, str]]:
    """Return, for each storage that existed before and is written, the positions where that rules out a cut, and what
    it does.

    ``timeless``: data does not decide on the path. The last position is below `NEVER` for scratch only.
    """
    written: dict[Storage, list[DataEvent]] = {}
    for event in events:
        for storage in event.writes:
            if storage.outside and not storage.foreign:
                written.setdefault(storage, []).append(event)
    for storage, writes in written.items():
        if storage.tainted < NEVER and live_at_start(storage, events):
            yield storage, 0, NEVER, "keeps values of this request for the next one in"
        elif not timeless or any(event.seq < storage.tainted for event in writes):
            # values independent of the inputs are written again by the tail's Python
            yield storage, 0, NEVER, "writes to"
        else:
            # rewritten before it is read: only the head needs it, as long as it is all before the cut
            yield storage, 0, max(event.seq for event in writes) - 1, "writes after it to"


def live_at_start(storage: Storage, events: list[DataEvent]) -> bool:
    """Return whether anything of a storage is read before it is overwritten."""
    live = LiveSet.empty(storage.elements)
    for event in sorted(events, key=lambda event: -event.seq):
        for found, view in event.overwrites:
            if found is storage:
                live = live.remove(view)
        for found, view in event.reads:
            if found is storage:
                live = live.add(view)
    return bool(live)


def bits_of(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's elements; of its form if they cannot be read."""
    text = f"{tensor.dtype} {tuple(tensor.shape)}"
    try:
        return f"{text} {xxhash.xxh3_64_hexdigest(bytes_of(tensor).numpy().data)}"
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        return text


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    storage = tensor.untyped_storage()
    return made.set_(storage, 0, (storage.nbytes(),), (1,))


class PassedOut:
    """Storages that existed before the forward and were passed to code outside torch; none for most models."""

    def __init__(self) -> None:
        self.known: dict[Storage, tuple[torch.Tensor, str]] = {}
        self.changed: set[Storage] = set()

    def add(self, storage: Storage, tensor: torch.Tensor) -> None:
        """Watch the bytes of this storage from now on."""
        if storage not in self.known and not storage.opaque:
            whole = _whole(tensor)
            self.known[storage] = whole, bits_of(whole)

    def look(self) -> None:
        """Compare the bytes; no operation has run since the last check or `settle`."""
        for storage, (whole, before) in self.known.items():
            now = bits_of(whole)
            if now != before:
                self.changed.add(storage)
                self.known[storage] = whole, now

    def settle(self) -> None:
        """An operation has run, whose writes are known."""
        for storage, (whole, _) in self.known.items():
            self.known[storage] = whole, bits_of(whole)


Fresh = Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]


def perturbed(fresh: Fresh) -> Iterator[Fresh]:
    """Sources of inputs of the same form with other values: the elements rearranged, numbers scaled.

    What is no number keeps its values (flags, indices, masks), so that the model probably takes the same path.
    """
    for seed, scale in ((1, 0.9375), (2, 0.75)):

        def other(seed: int = seed, scale: float = scale) -> tuple[tuple[Any, ...], dict[str, Any]]:
            args, kwargs = fresh()
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for tensor in flatten((args, kwargs))[1]:
                    _perturb(tensor, generator, scale)
            return args, kwargs

        yield other


def _perturb(tensor: torch.Tensor, generator: torch.Generator, scale: float) -> None:
    flat = tensor.detach().clone().reshape(-1)
    flat = flat[torch.randperm(len(flat), generator=generator).to(flat.device)]
    if tensor.is_floating_point() or tensor.is_complex():
        flat = flat * scale
    elif len(flat) == 1 and tensor.dtype is not torch.bool:
        flat = torch.where(flat > 0, flat - 1, flat + 1)
    tensor.copy_(flat.reshape(tensor.shape))
