"""Memory of the model that code outside torch has got hold of: NumPy views, raw pointers, storages.

What such code writes leaves no event. So while a model is recorded the bytes of every parameter, buffer or other
constant that was handed out are compared with what they were, at each step; and where tensors come from outside torch,
their bytes are noted, so that recordings with other inputs tell a constant table from a result.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import xxhash

from shared_hooks.recording.trace import NEVER, Event, Storage
from shared_hooks.tensors import LiveSet, bytes_of, flatten

# Python's garbage collector, put off while very many objects are made that all stay.
#
# A recording makes some dozen small objects an operation. The collector looks at the young ones again and again, and
# now and then at every object of the process, to find that nothing can go: half of the time of planning.


@contextmanager
def put_off() -> Iterator[None]:
    """No collection inside; reference counts free what they free. In threads at a time, the first to leave ends it."""
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
# A tail must leave the server's memory as it was, so no cut may have such a write in its tail, be it after the cut or
# in what the tail's Python repeats of the prefix. And where what was written depends on the inputs and is read by the
# next forward, the model carries state from request to request, which a cut would keep on one side only.
#
# A *scratch* storage is rewritten before it is read. The tail's side does not have what the head wrote there: a path
# that reads first must not be cut, and where data decides on the path nobody knows which one comes.


def outside_writes(events: list[Event], *, timeless: bool) -> Iterator[tuple[Storage, int, int, str]]:
    """For each storage that existed before and is written: the positions where that rules a cut out, and what it does.

    ``timeless``: data does not decide on the path. The last position is below `NEVER` for scratch alone.
    """
    written: dict[Storage, list[Event]] = {}
    for event in events:
        for storage in event.writes:
            if storage.outside and not storage.foreign:
                written.setdefault(storage, []).append(event)
    for storage, writes in written.items():
        if storage.tainted < NEVER and live_at_start(storage, events):
            yield storage, 0, NEVER, "keeps values of this request for the next one in"
        elif not timeless or any(event.seq < storage.tainted for event in writes):
            # what does not depend on the inputs is written again by the tail's Python
            yield storage, 0, NEVER, "writes to"
        else:
            # rewritten before it is read: the head's affair, as long as it is all before the cut
            yield storage, 0, max(event.seq for event in writes) - 1, "writes after it to"


def live_at_start(storage: Storage, events: list[Event]) -> bool:
    """Whether anything of a storage is read before it is overwritten."""
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
    """A digest of a tensor's elements; of its form where they cannot be read."""
    text = f"{tensor.dtype} {tuple(tensor.shape)}"
    try:
        return f"{text} {xxhash.xxh3_64_hexdigest(bytes_of(tensor).numpy().data)}"
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        return text


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    storage = tensor.untyped_storage()
    return made.set_(storage, 0, (storage.nbytes(),), (1,))


class Handed:
    """Storages that existed before the forward and were handed to code outside torch; none for most models."""

    def __init__(self) -> None:
        self.known: dict[Storage, tuple[torch.Tensor, str]] = {}
        self.changed: set[Storage] = set()

    def add(self, storage: Storage, tensor: torch.Tensor) -> None:
        """From now on the bytes of this storage are watched."""
        if storage not in self.known and not storage.opaque:
            whole = _whole(tensor)
            self.known[storage] = whole, bits_of(whole)

    def look(self) -> None:
        """Compare; no operation has run since the last look or `settle`."""
        for storage, (whole, before) in self.known.items():
            now = bits_of(whole)
            if now != before:
                self.changed.add(storage)
                self.known[storage] = whole, now

    def settle(self) -> None:
        """An operation has run: what it wrote is known."""
        for storage, (whole, _) in self.known.items():
            self.known[storage] = whole, bits_of(whole)


Fresh = Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]


def perturbed(fresh: Fresh) -> Iterator[Fresh]:
    """Sources of inputs of the same form with other values: the same elements in other places, numbers scaled.

    What is no number keeps its values (flags, indices, masks), so that the model likely takes the same path.
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
