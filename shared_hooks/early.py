"""What crosses a cut: the frontier's bytes, the Python values read before it, and the recipe to resume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from shared_hooks.errors import BadFrame, TooLarge
from shared_hooks.parcel import ALIGN, Parcel
from shared_hooks.recipe import MAX_RECIPE_BYTES, Recipe
from shared_hooks.trees import Structure, form_of

MAGIC = b"ISTHMUS1"
DEFAULT_MAX_BYTES = 1 << 30
_PREFIX = len(MAGIC) + 4 + 4 + 8 + 8


@dataclass(frozen=True, eq=False)
class EarlyOutput:
    """The result of a head. ``pieces``: one tensor per piece of each slot of ``recipe``, in order.

    They may lie in memory that must not be written (the ``bytes`` they came in). ``values``: structures of the Python
    values that were read from data. ``disposable``: used once, so the tail may work in its memory.
    """

    recipe: Recipe
    pieces: tuple[torch.Tensor, ...]
    values: tuple[Structure, ...]
    disposable: bool = False

    @property
    def layer_id(self) -> int:
        """The layer after which the model was cut; -1 for "input"."""
        return self.recipe.layer_id

    @property
    def layer_name(self) -> str:
        """The name of that layer."""
        return self.recipe.layer_name

    @property
    def nbytes(self) -> int:
        """Raw bytes of the frontier."""
        return self.recipe.payload_bytes

    def pack(self, codec: str = "raw") -> Parcel:
        """Header and payload, without the recipe."""
        return Parcel.of_tensors({"recipe": self.recipe.digest, "values": self.values}, list(self.pieces), codec)

    @classmethod
    def unpack(
        cls,
        recipe: Recipe,
        header: bytes,
        payload: Any,
        max_bytes: int = DEFAULT_MAX_BYTES,
        *,
        disposable: bool = False,
    ) -> EarlyOutput:
        """The reverse of `pack`. A writable ``payload`` is used in place. Raises `BadFrame`, `TooLarge`."""
        meta, tensors = Parcel.tensors(header, payload, max_bytes)
        if not isinstance(meta, dict) or meta.get("recipe") != recipe.digest:
            raise BadFrame("the payload belongs to another recipe")
        values = meta.get("values")
        if not isinstance(values, list) or [form_of(value) for value in values] != list(recipe.values):
            raise BadFrame("the header brings other Python values than the recipe needs")
        expected = [(slot.dtype, piece.shape) for slot in recipe.slots for piece in slot.pieces]
        if [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors] != expected:
            raise BadFrame("the payload has other tensors than the recipe")
        return cls(recipe, tuple(tensors), tuple(values), disposable)

    def to_bytes(self, codec: str = "raw") -> bytes:
        """Everything in one piece: magic, sizes, checksum, recipe, header, zeros, payload."""
        parcel = self.pack(codec)
        recipe = self.recipe.to_bytes()
        sizes = len(recipe).to_bytes(4, "little") + len(parcel.header).to_bytes(4, "little")
        sizes += parcel.nbytes.to_bytes(8, "little")
        front = MAGIC + sizes
        checksum = xxhash.xxh3_64_intdigest(front + recipe).to_bytes(8, "little")
        # dtypes need their own alignment; what kernels want beyond it, the tail sees to
        padding = bytes(-(_PREFIX + len(recipe) + len(parcel.header)) % ALIGN)
        return b"".join((front, checksum, recipe, parcel.header, padding, *parcel.buffers))

    @classmethod
    def from_bytes(cls, data: Any, max_bytes: int = DEFAULT_MAX_BYTES) -> EarlyOutput:
        """Read `to_bytes`.

        ``max_bytes`` bounds the payload and what is allocated for it. Raises `BadFrame`, `TooLarge`.
        """
        view = memoryview(data).cast("B")
        if len(view) < _PREFIX or view[: len(MAGIC)] != MAGIC:
            raise BadFrame("not the bytes of an EarlyOutput, or truncated before the sizes")
        recipe_size = int.from_bytes(view[8:12], "little")
        header_size = int.from_bytes(view[12:16], "little")
        payload_size = int.from_bytes(view[16:24], "little")
        if payload_size > max_bytes or recipe_size > MAX_RECIPE_BYTES:
            raise TooLarge(f"{max(payload_size, recipe_size)} bytes are announced; at most {max_bytes} are taken")
        start = _PREFIX + recipe_size + header_size
        padding = -start % ALIGN
        if len(view) != start + padding + payload_size or any(view[start : start + padding]):
            raise BadFrame(f"truncated or extended: {len(view)} bytes are not what the sizes at the front add up to")
        recipe_data = bytes(view[_PREFIX : _PREFIX + recipe_size])
        if view[24:_PREFIX] != xxhash.xxh3_64_intdigest(bytes(view[:24]) + recipe_data).to_bytes(8, "little"):
            raise BadFrame("altered: the checksum of the recipe is wrong")
        recipe = Recipe.from_bytes(recipe_data, max_bytes)
        header = bytes(view[_PREFIX + recipe_size : start])
        return cls.unpack(recipe, header, view[start + padding :].toreadonly(), max_bytes)
