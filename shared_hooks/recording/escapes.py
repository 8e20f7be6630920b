"""Memory of the model that code outside torch has got hold of: NumPy views, raw pointers, storages.

What such code writes leaves no event. So while a model is recorded the bytes of every parameter, buffer or other
constant that was handed out are compared with what they were, at each step; and where tensors come from outside torch,
their bytes are noted, so that recordings with other inputs tell a constant table from a result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import xxhash

from shared_hooks.recording.trace import Storage
from shared_hooks.tensors import bytes_of, flatten


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
