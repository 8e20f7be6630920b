"""Encode what crosses in numpy: the same bytes as `shared_hooks.codecs` makes, without PyTorch.

`LearnedCodecFile` is a codec of edge-client learn. "lz4", "shuffle-lz4", "zstd", "shuffle-zstd" and "sparse" are
lossless; "fp16", "int8" and "int6" round. The codecs need the packages lz4 and zstandard by their names; "sparse",
"int8" and "int6" need zstandard, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shared_hooks.errors import SpecError, near

Array = npt.NDArray[Any]
Coded = tuple[bytes, list[int]]
"""Bytes, and the codec's parameters."""


def encode(name: str, array: Array) -> Coded | None:
    """Encode an array. Returns None if that does not shrink it, or would alter it: then it is sent raw.

    Raises SpecError for an unknown codec.
    """
    if name not in CODECS:
        raise SpecError(f"codec={name!r}: here must be one of {', '.join(CODECS)}.{near(name, CODECS)}")
    found = CODECS[name](array) if array.size else None
    return None if found is None or len(found[0]) >= array.nbytes else found


def _package(name: str, part: str = "") -> Any:
    try:
        return import_module(f"{name}{part}")
    except ImportError as error:
        raise SpecError(f"codec: {name} is not installed: pip install {name}") from error


def _lz4(data: bytes) -> bytes:
    found: bytes = _package("lz4", ".block").compress(data, store_size=False)
    return found


def _zstd(data: bytes) -> bytes:
    found: bytes = _package("zstandard").ZstdCompressor(level=1).compress(data)
    return found


def _shuffled(array: Array) -> bytes:
    """Return the first byte of every element, then the second, and so on."""
    flat = np.frombuffer(array.tobytes(), np.uint8)
    return np.ascontiguousarray(flat.reshape(-1, array.itemsize).T).tobytes()


def _sparse(array: Array) -> Coded:
    """Encode the positions of nonzero elements, and these, rotated left by a bit and byte by byte."""
    words = np.frombuffer(array.tobytes(), f"<u{array.itemsize}")
    mask = words != 0
    kept = words[mask]
    turned = (kept << 1 | kept >> (8 * kept.itemsize - 1)).astype(kept.dtype)
    planes = turned.view(np.uint8).reshape(len(kept), -1).T if len(kept) else []
    runs = [np.packbits(mask, bitorder="little"), *map(np.ascontiguousarray, planes)]
    return b"".join(map(_run, runs)), [len(kept)]


def _half(array: Array) -> Coded | None:
    if array.dtype not in (np.float32, np.float64):
        return None
    with np.errstate(over="ignore"):
        found = array.astype(np.float32).astype(np.float16)  # rounded twice, as PyTorch does for float64
    return None if not np.array_equal(np.isinf(found), np.isinf(array)) else (found.tobytes(), [])


# "int8" and "int6", as in `shared_hooks.codecs.quantised`.

_LEAST, _LEAST_OF_GROUP, _LEAST_OF_TOKEN = 64, 256, 32
_FAR, _ROUNDS, _RARE = np.float32(10), 3, 256
_OCTAVE, _LARGEST, _SMALLEST = 8, 800, -720
_FRACTIONS: Final = (1.0, 1.0905077, 1.1892071, 1.2968396, 1.4142135, 1.5422108, 1.6817929, 1.8340081)
_OF_ALL, _OF_CHANNEL, _OF_TOKEN = range(3)
_OTHERS: Final = {_OF_ALL: (0, 1, 2), _OF_CHANNEL: (0, 2), _OF_TOKEN: (1,)}


def _grain(shape: tuple[int, ...]) -> tuple[int, tuple[int, int, int]]:
    """Return the grouping of steps, and the layout as outer, channels, inner (`shared_hooks.codecs.Grain`)."""
    count, is_map = int(np.prod(shape)), len(shape) >= 4
    axis = 1 if is_map else len(shape) - 1
    if axis < 0 or shape[axis] <= 1:
        grain = (1, max(1, count), 1) if is_map else (count, 1, 1)
        if is_map and count:
            grain = (shape[0], 1, count // shape[0])
    else:
        inner = int(np.prod(shape[axis + 1 :]))
        grain = (count // (shape[axis] * inner), shape[axis], inner)
    if is_map:
        whose = _OF_CHANNEL if grain[0] * grain[2] >= _LEAST_OF_GROUP else _OF_ALL
    else:
        whose = _OF_TOKEN if grain[1] >= _LEAST_OF_TOKEN else _OF_ALL
    return whose, (1, 1, count) if whose == _OF_ALL else grain


def _mean_root(values: Array, axes: tuple[int, ...]) -> Array:
    with np.errstate(over="ignore"):
        squares = np.square(values, dtype=np.float32).mean(axes, keepdims=True, dtype=np.float64)
    found: Array = np.sqrt(squares).astype(np.float32)
    return found


def _quantised(array: Array, bits: int) -> Coded | None:
    if array.dtype not in (np.float32, np.float64, np.float16) or array.size < _LEAST:
        return None
    whose, form = _grain(array.shape)
    values = array.astype(np.float32).reshape(form)
    axes = _OTHERS[whose]
    low = values.min(axes, keepdims=True)
    largest = np.maximum(values.max(axes, keepdims=True), -low)
    if not np.isfinite(largest).all():
        return None
    signed = bool((low < 0).any())
    side = (1 << bits - 1) - 1 if signed else (1 << bits) - 1
    zero, top_symbol = (float(side), 2 * side) if signed else (0.0, side)
    wanted = (largest / np.float32(side)).astype(np.float32)
    apart = np.zeros(values.shape, bool)
    uneven = largest > _FAR * _mean_root(values, axes)
    if uneven.any():
        found = _apart(values, uneven, axes)
        if found is not None:
            apart, near_largest, limit = found
            better = np.minimum((near_largest / np.float32(side)).astype(np.float32), 2 * limit)
            wanted = np.where(uneven, better, wanted)
    named = _steps(wanted.reshape(-1))
    if named is None:
        return None
    top, below = named
    octaves, eighths = np.divmod(np.int32(top) - below.astype(np.int32), _OCTAVE)
    steps = np.ldexp(np.array(_FRACTIONS, np.float32)[eighths], octaves).reshape(wanted.shape)
    numbers = values * (np.float32(1) / steps)
    if zero:
        numbers += np.float32(zero)
    symbols = np.rint(np.clip(numbers, 0, top_symbol)).astype(np.uint8)
    places = np.flatnonzero(apart).astype("<u4")
    runs = [below, places.view(np.uint8), values.reshape(-1)[places].astype("<f4").view(np.uint8), symbols.reshape(-1)]
    return b"".join(map(_run, runs)), [whose, form[1], form[2], int(signed), top, len(places)]


def _apart(values: Array, uneven: Array, axes: tuple[int, ...]) -> tuple[Array, Array, Array] | None:
    """Return the outliers, the largest of the rest, and the limit. None if there are too many."""
    size = np.abs(values)
    near_values = values
    limit = np.zeros_like(uneven, dtype=np.float32)
    for _ in range(_ROUNDS):
        limit = _FAR * _mean_root(near_values, axes)
        near_values = np.where(size <= limit, values, np.float32(0))
    far = (size > limit) & uneven
    if np.count_nonzero(far) * _RARE > values.size:
        return None
    return far, np.abs(near_values).max(axes, keepdims=True), limit


def _steps(wanted: Array) -> tuple[int, Array] | None:
    if not wanted.any():
        return 0, np.zeros(len(wanted), np.uint8)
    with np.errstate(divide="ignore"):
        eighths = np.ceil(np.log2(wanted.astype(np.float64)) * _OCTAVE)
    largest = eighths.max()
    if not _SMALLEST <= largest <= _LARGEST:
        return None
    return int(largest), np.clip(largest - eighths, 0, 255).astype(np.uint8)


def _run(run: Array) -> bytes:
    """Return a run of bytes preceded by its size, compressed if that is smaller."""
    zstandard = _package("zstandard")
    plain = run.tobytes()
    packed = plain
    if len(plain) >= 32:
        few = zstandard.ZstdCompressionParameters.from_level(1, hash_log=8)
        packed = zstandard.ZstdCompressor(compression_params=few).compress(plain)
    smaller = len(packed) < len(plain)
    number, digits = 2 * len(packed if smaller else plain) + smaller, bytearray()
    while number >= 128:
        digits.append(128 | number & 127)
        number >>= 7
    return bytes([*digits, number]) + (packed if smaller else plain)


# A codec trained for one cut (`shared_hooks.codecs.learned`): its encoder alone.

LEARNED: Final = "learned:"
_DIGITS, _BITS, _BLOCK, _AREA = 12, 12, 512, 16


class LearnedCodecFile:
    """A file of ``edge-client learn``. Raises SpecError for any other; needs the package safetensors.

    ``name``: on the wire; ``cut`` and ``weights``: what it was trained for.
    """

    def __init__(self, path: str | Path) -> None:
        numpy = _package("safetensors", ".numpy")
        try:
            data = Path(path).read_bytes()
            size = int.from_bytes(data[:8], "little")
            known = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["isthmus"])
            tensors = numpy.load(data)
            if known["format"] != "isthmus-learned-codec" or known["version"] != 1:
                raise ValueError("its format is another one")
            self.cut, self.weights = str(known["cut"]), str(known["weights"])
            self._designs = known["pieces"]
            self._often = {
                int(name.partition(".")[0]): table.astype(np.int64).tolist()
                for name, table in tensors.items()
                if name.endswith(".frequencies")
            }
            for number, design in enumerate(self._designs):
                if design is not None and len(self._often[number]) != design["symbols"]:
                    raise ValueError(f"piece {number}: its frequencies are none")
        except OSError as error:
            raise SpecError(f"{path} cannot be read: {error.strerror}") from error
        except Exception as error:  # safetensors raises an error class of its own
            raise SpecError(f"{path} is no learned codec: {error}") from error
        self._tensors = tensors
        plain = numpy.save(tensors, {"isthmus": json.dumps({**known, "provenance": {}}, sort_keys=True)})
        self.name = LEARNED + hashlib.sha256(plain).hexdigest()[:_DIGITS]

    def encode(self, number: int, array: Array) -> Coded | None:
        """Encode the ``number``-th piece of its cut; None for what it was not trained for, which is sent raw."""
        design = self._designs[number] if number < len(self._designs) else None
        if design is None or array.dtype not in (np.float32, np.float64, np.float16) or not np.isfinite(array).all():
            return None
        values = array.astype(np.float32)
        channels, levels = design["channels"], design["levels"]
        if design["kind"] == "tokens":
            if values.ndim >= 4 or values.shape[-1:] != (channels,):
                return None
            values = values.reshape(-1, channels)
            form = [len(values), 1, 1]
        else:
            if values.ndim != 4 or values.shape[1] != channels:
                return None
            form = [values.shape[0], *values.shape[2:]]
            if form[1] * form[2] > _AREA * design["size"][0] * design["size"][1]:
                return None
        found = self._levels(number, design, values)
        symbols = np.rint((np.tanh(found) + np.float32(1)) * np.float32((levels - 1) / 2)).astype(np.int64)
        data = self._packed(number, symbols.reshape(form[0], design["symbols"], -1))
        return None if len(data) >= array.nbytes else (data, [number, 0, *form])

    def _levels(self, number: int, design: Any, values: Array) -> Array:
        """Return the encoder's output before bounding."""

        def own(name: str) -> Array:
            found: Array = self._tensors[f"{number}.{name}"]
            return found

        if design["kind"] == "tokens":
            flat: Array = (values - own("mean")) / own("scale")
            return flat @ own("encoder.weight").T + own("encoder.bias")
        values = (values - own("mean")[:, None, None]) / own("scale")[:, None, None]
        factor = 1 << design["halvings"]
        high, wide = (-size % factor for size in values.shape[2:])
        values = np.pad(values, ((0, 0), (0, 0), (0, high), (0, wide)), mode="edge")
        stages = max(1, design["halvings"])
        for stage in range(stages):
            made = _conv(values, own(f"encoder.{2 * stage}.weight"), 2 if design["halvings"] else 1)
            values = np.maximum(made + own(f"encoder.{2 * stage}.bias")[:, None, None], 0)
        weight, bias = own(f"encoder.{2 * stages}.weight"), own(f"encoder.{2 * stages}.bias")
        last: Array = np.einsum("oc,nchw->nohw", weight[:, :, 0, 0], values) + bias[:, None, None]
        return last

    def _packed(self, number: int, symbols: Array) -> bytes:
        """Pack by the frequencies of training; see `shared_hooks.codecs.learned.SymbolCoder`."""
        often = self._often[number]
        below = [[0, *np.cumsum(row)[:-1].tolist()] for row in often]
        rows = np.tile(np.repeat(np.arange(symbols.shape[1]), symbols.shape[2]), len(symbols)).tolist()
        flat, blocks = symbols.reshape(-1).tolist(), []
        for start in range(0, len(flat), _BLOCK):
            state = 1
            for at in range(min(start + _BLOCK, len(flat)) - 1, start - 1, -1):
                row, symbol = rows[at], flat[at]
                count, rest = divmod(state, often[row][symbol])
                state = (count << _BITS) + below[row][symbol] + rest
            blocks.append(state.to_bytes((state.bit_length() + 7) // 8, "little"))
        return b"".join([*(len(block).to_bytes(2, "little") for block in blocks[:-1]), *blocks])


def _conv(values: Array, weight: Array, stride: int) -> Array:
    """Convolve three by three with zero padding."""
    padded = np.pad(values, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))[:, :, ::stride, ::stride]
    found: Array = np.tensordot(windows, weight, ((1, 4, 5), (1, 2, 3))).transpose(0, 3, 1, 2)
    return found


CODECS: Final[dict[str, Callable[[Array], Coded | None]]] = {
    "lz4": lambda array: (_lz4(array.tobytes()), []),
    "zstd": lambda array: (_zstd(array.tobytes()), []),
    "shuffle-lz4": lambda array: (_lz4(_shuffled(array)), []),
    "shuffle-zstd": lambda array: (_zstd(_shuffled(array)), []),
    "sparse": _sparse,
    "fp16": _half,
    "int8": partial(_quantised, bits=8),
    "int6": partial(_quantised, bits=6),
}
ROUNDING: Final = ("fp16", "int8", "int6")
"""Lossy codecs."""
NAMES: Final = ("raw", *CODECS)
