"""A parcel in the making: sections are added one by one, in any order, and their bytes may leave at once.

A section that was added before the others are there comes with a digest of what its tensor held: `holds` tells whether
that is still so once the parcel is closed.
"""

from __future__ import annotations

import json
from typing import Any, Final

import torch
import xxhash

from shared_hooks.codecs import RAW, Codec, Coded, Grain
from shared_hooks.tensors import View, dtype_name

ALIGN: Final = 64
ALIGNED: Final = ("raw", "lz4")
"""Codecs whose sections begin at multiples of `ALIGN`: raw tensors are used where they lie, lz4 is as old as these."""
DIGEST: Final = 8


class Packing:
    """Tensors of any device; dense ones on the CPU are not copied, and must live until the bytes have left."""

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        """The payload so far."""
        self.nbytes = 0
        self._entries: dict[int, list[Any]] = {}
        self._held: dict[int, int] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._entries

    def add(
        self, number: int, tensor: torch.Tensor, codec: Codec, grain: Grain | None = None
    ) -> tuple[memoryview, ...]:
        """Encode a tensor as section ``number``, behind those before it; what was added to the payload.

        ``grain``: where the tensor's own shape does not tell. What ``codec`` does not make smaller is raw.
        """
        flat, stride = storage_order(tensor)
        grain = grain or Grain.of(tuple(tensor.shape), tuple(stride))
        name, (data, params) = _encoded(flat, grain, codec)
        checksum = xxhash.xxh3_64_intdigest(data)
        entry = [name, dtype_name(tensor.dtype), list(tensor.shape), stride, len(data), checksum]
        self._entries[number] = [*entry, params] if params else entry
        before, after = (-self.nbytes % ALIGN, -len(data) % ALIGN) if name in ALIGNED else (0, 0)
        added = [memoryview(bytes(before))] if before else []
        added += [data, memoryview(bytes(after))] if after else [data]
        self.buffers += added
        self.nbytes += before + len(data) + after
        return tuple(added)

    def hold(self, number: int, tensor: torch.Tensor) -> None:
        """Note what the tensor of a section holds now."""
        self._held[number] = _digest(tensor)

    def holds(self, number: int, tensor: torch.Tensor) -> bool:
        """Whether that is what ``tensor`` holds."""
        return self._held.get(number) == _digest(tensor)

    @property
    def codecs(self) -> tuple[str, ...]:
        """By name, of each section."""
        return tuple(self._entries[number][0] for number in sorted(self._entries))

    def header(self, meta: Any) -> bytes:
        """The header of all sections, which must be numbered from 0 without gaps."""
        sections = [self._entries[number] for number in range(len(self._entries))]
        data = {"v": 1, "meta": meta, "sections": sections}
        if (order := list(self._entries)) != sorted(order):
            data["order"] = order
        body = json.dumps(data, separators=(",", ":")).encode()
        return xxhash.xxh3_64_intdigest(body).to_bytes(DIGEST, "little") + body


def _digest(tensor: torch.Tensor) -> int:
    flat, _ = storage_order(tensor)
    return xxhash.xxh3_64_intdigest(_encoded(flat, Grain.of(tuple(flat.shape), (1,)), RAW)[1].data)


def _encoded(flat: torch.Tensor, grain: Grain, wanted: Codec) -> tuple[str, Coded]:
    """A flat tensor, and the name of the codec that it was worth."""
    coded = wanted.encode(flat, grain) if flat.numel() else None
    if coded is None or wanted is RAW or len(coded.data) >= flat.numel() * flat.itemsize:
        wanted, coded = RAW, RAW.encode(flat, grain)
    assert coded is not None, "raw takes every tensor"
    return wanted.name, coded


def storage_order(tensor: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """The elements of a tensor as a flat one, and the strides that give the tensor back."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if not plain.is_contiguous() and not View.of(plain).is_run():
        plain = plain.contiguous()
    return plain.as_strided((plain.numel(),), (1,), plain.storage_offset()), list(plain.stride())
