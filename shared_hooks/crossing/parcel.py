"""A parcel: tensors and a little text as one header and one payload of raw bytes.

Format of the header: 8 bytes (xxh3-64 of the rest, little endian), then UTF-8 JSON ``{"v": 1, "meta": ..., "sections":
[[codec, dtype, shape, stride, nbytes, checksum], ...]}``; a codec's parameters, if it has any, are a list and the
seventh entry. The payload is the sections in order (``"order"``, where it is, has their numbers as they lie), those of
`ALIGNED` codecs from and up to a multiple of 64 bytes, with zeros between, so that a tensor can be used where it lies.
A section holds the elements in storage order where the tensor is dense (``stride`` says which), else in row-major
order. ``checksum`` is xxh3-64 of the encoded bytes. No pickle.
"""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import xxhash

from shared_hooks.codecs import CODECS, RAW, Bound, Codec, Coded, Grain, Param, by_wire, offered
from shared_hooks.codecs.codec import MAX_PARAMS, MAX_TEXT
from shared_hooks.errors import MALFORMED, BadFrame, TooLarge
from shared_hooks.showing import short
from shared_hooks.tensors import PLAIN, ClassFinder, View, dtype_name, dtype_named, flatten, no_class, unflatten

# A parcel being built: sections are added one by one, in any order, and their bytes may be sent at once.
#
# A section that was added early comes with a digest of its tensor: `holds` checks whether it is unchanged once the
# parcel is closed.


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
        name, coded = _encoded(flat, grain, codec)
        return self.add_coded(number, name, coded, tensor.dtype, list(tensor.shape), stride)

    def add_coded(
        self, number: int, name: str, coded: Coded, dtype: torch.dtype, shape: list[int], stride: list[int]
    ) -> tuple[memoryview, ...]:
        """Return the same of a tensor that a codec of this name has encoded; the reader of the parcel checks that."""
        data, params = coded
        checksum = xxhash.xxh3_64_intdigest(data)
        entry = [name, dtype_name(dtype), shape, stride, len(data), checksum]
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
        """Return whether that is what ``tensor`` holds."""
        return self._held.get(number) == _digest(tensor)

    @property
    def codecs(self) -> tuple[str, ...]:
        """By name, of each section."""
        return tuple(self._entries[number][0] for number in sorted(self._entries))

    def header(self, meta: Any) -> bytes:
        """Return the header of all sections, which must be numbered from 0 without gaps."""
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
    """Return a flat tensor, and the name of the codec that it was worth."""
    coded = wanted.encode(flat, grain) if flat.numel() else None
    if coded is None or wanted is RAW or (wanted.shrinks and len(coded.data) >= flat.numel() * flat.itemsize):
        wanted, coded = RAW, RAW.encode(flat, grain)
    assert coded is not None, "raw takes every tensor"
    return wanted.name, coded


def has_gaps(tensor: torch.Tensor) -> bool:
    """Return whether its elements lie apart in memory, or on each other: it is sent row by row."""
    return not tensor.is_contiguous() and not View.of(tensor).is_run()


def storage_order(tensor: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Return the elements of a tensor as a flat one, and the strides that give the tensor back."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if has_gaps(plain):
        plain = plain.contiguous()
    return plain.as_strided((plain.numel(),), (1,), plain.storage_offset()), list(plain.stride())


MAX_HEADER_BYTES = 16 << 20
MAX_SECTIONS = 65_536
MAX_RANK = 32


class Section(NamedTuple):
    """One encoded tensor. ``nbytes``: encoded size; ``raw_bytes``: decoded size; ``aligned``: where it lies begins and
    ends at multiples of `ALIGN`.
    """

    codec: Codec
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int
    params: tuple[Param, ...]
    elements: int
    raw_bytes: int
    aligned: bool


class Sections(NamedTuple):
    """What a header says of its tensors. ``starts``: where each begins in the payload of ``nbytes`` bytes;
    ``raw_bytes``: of all tensors, decoded.
    """

    each: list[Section]
    checksums: list[Any]
    starts: list[int]
    nbytes: int
    raw_bytes: int


@short
@dataclass(frozen=True)
class Parcel:
    """A header and the buffers that make up the payload, in order. ``keep`` owns the memory behind the buffers.

    ``codecs``: by name, what each tensor was encoded with.
    """

    header: bytes
    buffers: tuple[memoryview, ...]
    nbytes: int
    keep: tuple[Any, ...] = ()
    codecs: tuple[str, ...] = ()

    @classmethod
    def of_tensors(
        cls,
        meta: Any,
        tensors: list[torch.Tensor],
        codec: str | Codec | Sequence[Codec] = "raw",
        grains: Sequence[Grain] = (),
    ) -> Parcel:
        """Pack tensors of any device; dense ones on the CPU are not copied.

        ``codec``: a codec, the name of one of `CODECS`, or the codecs of the first tensors (the others go raw); what it
        does not make smaller is sent raw. ``grains``: of the first tensors, where their own shapes do not tell.
        """
        wanted = by_wire(codec) if isinstance(codec, str) else codec
        if wanted is None:
            raise ValueError(f"unknown codec {codec!r}: this side has {', '.join(offered())}")
        packing = Packing()
        for number, tensor in enumerate(tensors):
            if isinstance(wanted, Codec):
                own = wanted
            else:
                own = wanted[number] if number < len(wanted) else RAW
            packing.add(number, tensor, own, grains[number] if number < len(grains) else None)
        return cls.packed(packing, meta, tensors)

    @classmethod
    def packed(cls, packing: Packing, meta: Any, tensors: Sequence[torch.Tensor]) -> Parcel:
        """Return what was packed section by section, of ``tensors``."""
        return cls(packing.header(meta), tuple(packing.buffers), packing.nbytes, tuple(tensors), packing.codecs)

    @classmethod
    def of_value(cls, value: Any, codec: str = "raw") -> Parcel:
        """Pack a nested value. Raises `UnknownHolder` (an `InputMismatch`) for objects that cannot be taken apart."""
        structure, tensors = flatten(value)
        return cls.of_tensors(structure, tensors, codec)

    @staticmethod
    def to_value(header: bytes, payload: Any, like: ClassFinder = no_class, max_bytes: int = 1 << 40) -> Any:
        """Rebuild a nested value; ``like`` finds the classes of dataclasses and named tuples (else plain
        containers).
        """
        if memoryview(payload).readonly:
            payload = bytearray(payload)
        structure, tensors = Parcel.tensors(header, payload, max_bytes)
        return unflatten(structure, list(tensors), like)

    @staticmethod
    def check_header(header: bytes, max_bytes: int) -> int:
        """Return the payload size a header announces, in bytes. `BadFrame` or `TooLarge` before anything is
        allocated.
        """
        return Parcel.bounded(read_header(header)[1], max_bytes)

    @staticmethod
    def bounded(sections: Sections, max_bytes: int) -> int:
        """Return the payload size that sections announce. Raises TooLarge."""
        most = max(sections.nbytes, sections.raw_bytes)
        if most > max_bytes:
            raise TooLarge(f"a payload of {most} bytes is announced; at most {max_bytes} are taken")
        return sections.nbytes

    @staticmethod
    def tensors(
        header: bytes, payload: Any, max_bytes: int = 1 << 40, bound: Bound = ()
    ) -> tuple[Any, list[torch.Tensor]]:
        """Return the meta data and the tensors. Raw sections are used where they lie, each as a storage of its own.

        ``bound``: of the first tensors, codecs in place of those of `CODECS`. Over a payload that must not be written
        (``bytes``) the tensors must not be written either.
        """
        meta, sections = read_header(header, bound)
        if Parcel.bounded(sections, max_bytes) != len(payload):
            raise BadFrame(f"a payload of {len(payload)} bytes where the header announces another size")
        view = memoryview(payload).cast("B")
        address = _address(view)
        tensors = []
        for section, checksum, start in zip(sections.each, sections.checksums, sections.starts, strict=True):
            place = None if address is None else address + start
            tensors.append(_decode(section, checksum, view[start : start + section.nbytes], place))
        return meta, tensors


def borrowed(view: memoryview) -> torch.Tensor:
    """Return the bytes of a buffer as a tensor, without a copy; it keeps the buffer alive."""
    return _shown(view, _address(view)) if len(view) else torch.empty(0, dtype=torch.uint8)


def _address(view: memoryview) -> int | None:
    """Return where a buffer that is read-only lies: torch, which warns about such, is shown the memory by its
    address.
    """
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data) if view.readonly and len(view) else None


def _shown(view: memoryview, address: int | None) -> torch.Tensor:
    if address is None:
        return torch.frombuffer(view, dtype=torch.uint8)
    memory = (ctypes.c_char * len(view)).from_address(address)
    memory.owner = view  # type: ignore[attr-defined]
    return torch.frombuffer(memory, dtype=torch.uint8)


def read_header(header: bytes, bound: Bound = ()) -> tuple[Any, Sections]:
    """Check and parse a header. ``bound``: as in `Parcel.tensors`."""
    if len(header) > MAX_HEADER_BYTES:
        raise TooLarge(f"a header of {len(header)} bytes; at most {MAX_HEADER_BYTES} are taken")
    header = bytes(header)
    body = header[DIGEST:]
    if header[:DIGEST] != xxhash.xxh3_64_intdigest(body).to_bytes(DIGEST, "little"):
        raise BadFrame("the header is truncated or altered: its checksum is wrong")
    try:
        data = json.loads(body)
        if data["v"] != 1:
            raise BadFrame(f"header version {data['v']!r:.20}; this side reads 1")
        entries = data["sections"]
        if len(entries) > MAX_SECTIONS:
            raise TooLarge(f"{len(entries)} sections are announced; at most {MAX_SECTIONS} are taken")
        order = _order(data.get("order"), len(entries))
        sections, checksums = [], []
        for number, (name, dtype, shape, stride, nbytes, checksum, *more) in enumerate(entries):
            shape, stride, codecs = tuple(shape), tuple(stride), bound[number] if number < len(bound) else None
            # anything but numbers ends in `_section`, including what equals one
            if more or codecs or {*map(type, shape), *map(type, stride), type(nbytes)} != {int}:
                section = _section(name, dtype, shape, stride, nbytes, parameters_of(*more) if more else (), codecs)
            else:
                section = _known_section(name, dtype, shape, stride, nbytes)
            sections.append(section)
            checksums.append(checksum)
        return data["meta"], _lying(sections, checksums, order)
    except BadFrame:
        raise
    except MALFORMED as error:
        raise BadFrame(f"malformed header: {error!s:.100}") from error


def _order(order: Any, count: int) -> Sequence[int]:
    """Numbers of the sections as they lie."""
    if order is None:
        return range(count)
    if not isinstance(order, list) or len(order) != count or any(type(number) is not int for number in order):
        raise BadFrame("malformed header: the order of the sections is not theirs")
    if set(order) != set(range(count)):
        raise BadFrame("malformed header: the order of the sections is not theirs")
    return order


def _lying(sections: list[Section], checksums: list[Any], order: Sequence[int]) -> Sections:
    starts, end, raw = [0] * len(sections), 0, 0
    for number in order:
        section = sections[number]
        starts[number] = end = end + (-end % ALIGN if section.aligned else 0)
        end += section.nbytes + (-section.nbytes % ALIGN if section.aligned else 0)
        raw += section.raw_bytes
    return Sections(sections, checksums, starts, end, raw)


def _section(
    name: Any,
    dtype: Any,
    shape: tuple[Any, ...],
    stride: tuple[Any, ...],
    nbytes: Any,
    params: tuple[Param, ...] = (),
    bound: Mapping[str, Codec] | None = None,
) -> Section:
    codec = (bound or CODECS).get(name) or by_wire(name)
    if codec is None:
        raise BadFrame(f"unknown codec {name!r:.40}; this side has {', '.join(offered())}")
    if len(shape) > MAX_RANK or len(shape) != len(stride):
        raise TooLarge(f"a tensor of rank {len(shape)}; at most {MAX_RANK} are taken")
    if not all(type(number) is int and 0 <= number < 1 << 48 for number in (*shape, *stride, nbytes)):
        raise BadFrame("malformed header: sizes must be numbers that are not negative")
    if dtype_named(dtype) not in PLAIN:
        raise BadFrame(f"tensors of dtype {dtype} do not travel")
    view, of = View(shape, stride, 0), dtype_named(dtype)
    elements = view.numel
    section = Section(codec, of, shape, stride, nbytes, params, elements, elements * of.itemsize, codec.name in ALIGNED)
    if not elements and codec is not RAW:
        raise BadFrame(f"malformed header: codec {codec.name} for a tensor without elements")
    if elements and not view.is_run():
        raise BadFrame("malformed header: strides with gaps or overlap")
    try:
        codec.check(params, section.dtype, section.elements, nbytes)
    except ValueError as error:
        raise BadFrame(
            f"{nbytes} bytes of codec {codec.name} are announced for a tensor of {section.raw_bytes} bytes: {error}"
        ) from error
    return section


@functools.lru_cache(1024)
def _known_section(name: Any, dtype: Any, shape: tuple[int, ...], stride: tuple[int, ...], nbytes: int) -> Section:
    """Return a section of a codec that knows nothing of a client, whose check says the same each time."""
    return _section(name, dtype, shape, stride, nbytes)


def parameters_of(params: Any) -> tuple[Param, ...]:
    """Return a codec's parameters, as JSON has them. Raises BadFrame."""
    if not isinstance(params, list) or len(params) > MAX_PARAMS:
        raise BadFrame(f"malformed header: a codec's parameters are a list of at most {MAX_PARAMS}")
    for one in params:
        is_number = type(one) in (int, float) and -(1 << 63) <= one < 1 << 63  # excludes NaN, too
        if not is_number and not (isinstance(one, str) and len(one) <= MAX_TEXT):
            raise BadFrame("malformed header: a codec's parameters are numbers and short texts")
    return tuple(params)


def _decode(section: Section, checksum: Any, view: memoryview, address: int | None) -> torch.Tensor:
    if xxhash.xxh3_64_intdigest(view) != checksum:
        raise BadFrame("the payload is altered: a checksum is wrong")
    elements, nbytes = section.elements, section.raw_bytes
    try:
        decoded = section.codec.decode(view, section.params, section.dtype, elements)
    except ValueError as error:
        raise BadFrame(f"a tensor of codec {section.codec.name} does not decode") from error
    if isinstance(decoded, torch.Tensor):
        if decoded.dtype is not section.dtype or decoded.shape != (elements,) or not decoded.is_contiguous():
            raise BadFrame(f"a tensor of codec {section.codec.name} is another one than announced")
        return decoded.as_strided(section.shape, section.stride)
    if len(decoded) != nbytes:
        raise BadFrame(f"a tensor of codec {section.codec.name} has another size than announced")
    if not nbytes:
        return torch.empty_strided(section.shape, section.stride, dtype=section.dtype)
    if decoded is not view:
        data = borrowed(decoded)
    else:
        data = torch.frombuffer(view, dtype=torch.uint8) if address is None else _shown(view, address)
    return data.view(section.dtype).as_strided(section.shape, section.stride)
