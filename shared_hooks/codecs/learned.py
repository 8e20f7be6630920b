"""Load codecs trained for one cut of one model (``edge-client learn``), and read and write their files.

A small encoder turns a piece into symbols and a small decoder restores it: convolutions for feature maps, linear maps
for tokens. Each symbol has one of a few levels (finite scalar quantisation: F. Mentzer et al., "Finite Scalar
Quantization: VQ-VAE Made Simple", ICLR 2024). An entropy coder packs them by their frequencies in training (asymmetric
numeral systems: J. Duda, arXiv:1311.2540).

Both sides load the file themselves; on the wire a codec is named by its digest, "learned:4f1c09a7be21". The decoder
runs on the CPU, so its result has that machine's rounding.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn
from torch.nn import functional

from shared_hooks.codecs.codec import Codec, Coded, Grain, Param
from shared_hooks.errors import MALFORMED, SpecError
from shared_hooks.files import write_bytes

FORMAT: Final = "isthmus-learned-codec"
VERSION: Final = 1
PREFIX: Final = "learned:"
MAX_FILE_BYTES: Final = 256 << 20
MAX_PIECES: Final = 256
_MAX_META: Final = 1 << 20
_DIGITS: Final = 12
"""Hexadecimal digits of a file's digest in its name."""
_FLOATS: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_AREA: Final = 16
"""Maximum area of a map, relative to those the codec was trained on."""
_WORKING_ELEMENTS: Final = 1 << 22
"""Maximum elements of the largest intermediate map decoded at a time."""


@dataclass(frozen=True)
class Design:
    """The architecture of one piece's encoder and decoder.

    ``kind``: "map" for (N, C, H, W), "tokens" for (rows, D). ``channels``: C or D. ``hidden``: hidden channels.
    ``halvings``: how often a map is halved, in both directions. ``symbols``: per remaining position, each of ``levels``
    levels. ``size``: height and width of the training maps; (1, 1) for tokens. ``positive``: whether the piece is never
    negative.
    """

    kind: str
    channels: int
    hidden: int
    halvings: int
    symbols: int
    levels: int
    size: tuple[int, int] = (1, 1)
    positive: bool = False

    def __post_init__(self) -> None:
        bounds = {
            "channels": (1, 1 << 16),
            "hidden": (1, max(16, 4 * self.channels)),
            "halvings": (0, 6),
            "symbols": (1, min(4096, self.channels << 2 * self.halvings)),
            "levels": (2, 64),
        }
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"{name}: expected {least} to {most}, found {value!r:.40}")
        if self.kind not in ("map", "tokens") or (self.kind == "tokens" and self.halvings):
            raise ValueError(f"kind: expected map or tokens, found {self.kind!r:.40}")
        if len(self.size) != 2 or not all(type(one) is int and 1 <= one <= 1 << 16 for one in self.size):
            raise ValueError(f"size: expected a height and a width, found {self.size!r:.40}")

    @property
    def factor(self) -> int:
        return 1 << self.halvings

    def form_of(self, grain: Grain, elements: int) -> tuple[int, int, int] | None:
        """Return (N, H, W) of a piece, or None if its shape differs from those of training.

        For tokens H is 1, and W is how many of them lie side by side, feature by feature, in memory: 1, unless their
        tensor was transposed.
        """
        if self.kind == "tokens":
            fits = not grain.is_map and grain.channels == self.channels
            return (grain.outer, 1, grain.inner) if fits else None
        if not grain.is_map or grain.channels != self.channels or grain.inner % grain.width:
            return None
        height, width = grain.inner // grain.width, grain.width
        if grain.inner == 1:  # channels last: the memory does not show the size of one map
            height, width = self.size
            if grain.outer % (height * width):
                return None
            return grain.outer // (height * width), height, width
        return (grain.outer, height, width) if self.takes(grain.outer, height, width, elements) else None

    def takes(self, count: int, height: int, width: int, elements: int) -> bool:
        """Return whether ``elements`` make up so many maps of this size, or rows of tokens, and no map is too large."""
        is_whole = count >= 1 and count * self.channels * height * width == elements
        if self.kind == "tokens":
            return is_whole and height == 1
        return is_whole and height * width <= _AREA * self.size[0] * self.size[1]

    def symbol_shape(self, count: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Return (N, symbols, h, w), the shape of the symbols."""
        if self.kind == "tokens":
            return count * width, self.symbols, 1, 1
        return count, self.symbols, -(-height // self.factor), -(-width // self.factor)


class Bottleneck(nn.Module):
    """Encoder and decoder of one piece, in float32. ``mean`` and ``scale``, (C,), normalise its values."""

    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self, design: Design) -> None:
        super().__init__()
        self.design = design
        self.register_buffer("mean", torch.zeros(design.channels))
        self.register_buffer("scale", torch.ones(design.channels))
        hidden, channels, symbols = design.hidden, design.channels, design.symbols
        if design.kind == "tokens":
            self.encoder: nn.Module = nn.Linear(channels, symbols)
            self.straight: nn.Module = nn.Linear(symbols, channels)
            self.decoder: nn.Module = nn.Sequential(
                nn.Linear(symbols, hidden), nn.GELU(), nn.Linear(hidden, channels, bias=False)
            )
            return
        down: list[nn.Module] = []
        for number in range(max(1, design.halvings)):
            stride = 2 if design.halvings else 1
            down += [nn.Conv2d(channels if not number else hidden, hidden, 3, stride, 1), nn.ReLU()]
        self.encoder = nn.Sequential(*down, nn.Conv2d(hidden, symbols, 1))
        up: list[nn.Module] = [nn.Conv2d(symbols, hidden, 3, 1, 1), nn.ReLU()]
        for _ in range(design.halvings):
            up += [nn.Upsample(scale_factor=2), nn.Conv2d(hidden, hidden, 3, 1, 1), nn.ReLU()]
        self.decoder = nn.Sequential(*up, nn.Conv2d(hidden, channels, 3, 1, 1))

    def levels_of(self, values: torch.Tensor) -> torch.Tensor:
        """Encode to levels between 0 and ``levels - 1``, not rounded. ``values``: (N, C, H, W) or (rows, D)."""
        design = self.design
        if design.kind == "tokens":
            found = self.encoder((values - self.mean) / self.scale)
        else:
            values = (values - self.mean.view(-1, 1, 1)) / self.scale.view(-1, 1, 1)
            high, wide = (-size % design.factor for size in values.shape[-2:])
            if high or wide:
                values = functional.pad(values, (0, wide, 0, high), mode="replicate")
            found = self.encoder(values)
        levels: torch.Tensor = (torch.tanh(found) + 1) * ((design.levels - 1) / 2)
        return levels

    def values_of(self, symbols: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """Decode ``symbols`` (float, 0 to ``levels - 1``). ``size``: height and width of the maps."""
        design = self.design
        symbols = symbols * (2 / (design.levels - 1)) - 1
        if design.kind == "tokens":
            found = (self.straight(symbols) + self.decoder(symbols)) * self.scale + self.mean
        else:
            found = self.decoder(symbols)[..., : size[0], : size[1]]
            found = found * self.scale.view(-1, 1, 1) + self.mean.view(-1, 1, 1)
        values: torch.Tensor = found.clamp(min=0) if design.positive else found
        return values


# Symbols as bytes, by their frequencies in training.
#
# The state of an asymmetric numeral system is one integer, which Python has in any size: a symbol of frequency f
# among 2**12 makes it 2**12 / f times as large. Blocks keep it short. Within two bytes a block of the entropy; no
# library that is built for ARM has a coder for so few symbols (docs/decisions/0042-learned-codecs.md).

_BITS: Final = 12
_WHOLE: Final = 1 << _BITS
_BLOCK: Final = 512


class SymbolCoder:
    """Entropy coder of symbols. ``frequencies``: (symbols, levels), whole numbers of at least 1; each row sums
    to 4096.
    """

    def __init__(self, frequencies: npt.NDArray[np.int64]) -> None:
        self._often = [[int(one) for one in row] for row in frequencies]
        self._below = [[0, *np.cumsum(row)[:-1].tolist()] for row in frequencies]
        self._found = [np.repeat(np.arange(len(row)), row).tolist() for row in frequencies]

    @staticmethod
    def frequencies_of(counts: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """Return frequencies from counts (symbols, levels). A level that never occurred keeps a frequency, so it can be
        sent.
        """
        levels = counts.shape[1]
        shares = (counts + 0.5) / (counts + 0.5).sum(axis=1, keepdims=True)
        found: npt.NDArray[np.int64] = 1 + np.floor(shares * (_WHOLE - levels)).astype(np.int64)
        found[np.arange(len(found)), found.argmax(axis=1)] += _WHOLE - found.sum(axis=1)
        return found

    def pack(self, symbols: npt.NDArray[np.int64]) -> bytes:
        """Pack ``symbols``, (N, symbols, positions), to bytes."""
        flat, blocks = symbols.reshape(-1), []
        for start in range(0, len(flat), _BLOCK):
            some = flat[start : start + _BLOCK].tolist()
            state = 1
            for symbol, row in zip(reversed(some), reversed(_rows(symbols.shape, start, len(some))), strict=True):
                count, rest = divmod(state, self._often[row][symbol])
                state = (count << _BITS) + self._below[row][symbol] + rest
            blocks.append(state.to_bytes((state.bit_length() + 7) // 8, "little"))
        sizes = b"".join(len(block).to_bytes(2, "little") for block in blocks[:-1])
        return sizes + b"".join(blocks)

    def unpack(self, data: bytes, shape: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
        """Unpack bytes of `pack`. Raises ValueError for data that does not encode so many symbols."""
        total = math.prod(shape)
        count = -(-total // _BLOCK)
        at = 2 * (count - 1)
        if len(data) < _least_bytes(total):
            raise ValueError("fewer bytes than its blocks have")
        sizes = [int.from_bytes(data[2 * number : 2 * number + 2], "little") for number in range(count - 1)]
        sizes.append(len(data) - at - sum(sizes))
        if sizes[-1] < 0 or max(sizes) > 2 * _BLOCK:
            raise ValueError("the sizes of its blocks do not add up")
        found = np.empty(total, dtype=np.uint8)
        for number, size in enumerate(sizes):
            state, at = int.from_bytes(data[at : at + size], "little"), at + size
            start, some = number * _BLOCK, []
            for row in _rows(shape, start, min(_BLOCK, total - start)):
                rest = state & (_WHOLE - 1)
                symbol = self._found[row][rest]
                state = self._often[row][symbol] * (state >> _BITS) + rest - self._below[row][symbol]
                some.append(symbol)
            if state != 1:
                raise ValueError("no symbols are packed so")
            found[start : start + len(some)] = some
        return found.reshape(shape)


def _rows(shape: Sequence[int], start: int, count: int) -> list[int]:
    """Return, for ``count`` symbols from ``start`` on, the row of frequencies of each."""
    rows: list[int] = (np.arange(start, start + count) // shape[2] % shape[1]).tolist()
    return rows


def _least_bytes(symbols: int) -> int:
    """Return the minimum size of an encoding: one byte per block, and the sizes of all blocks but the last."""
    return 3 * -(-symbols // _BLOCK) - 2


@dataclass(frozen=True, eq=False)
class Piece:
    """The trained codec of one piece. ``frequencies``: see `SymbolCoder`."""

    net: Bottleneck
    frequencies: npt.NDArray[np.int64]

    @property
    def design(self) -> Design:
        return self.net.design

    @cached_property
    def coder(self) -> SymbolCoder:
        return SymbolCoder(self.frequencies)


@dataclass(frozen=True, eq=False)
class LearnedFile:
    """The contents of a codec file.

    ``cut``: the name of the layer after which it was trained; ``pieces``: one for each piece that crosses there, None
    for those sent raw. ``provenance``: how it was trained, for people.
    """

    model_id: str
    weights_hash: str
    cut: str
    pieces: tuple[Piece | None, ...]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Serialise to safetensors. The same codec gives the same bytes."""
        tensors: dict[str, torch.Tensor] = {}
        for number, piece in enumerate(self.pieces):
            if piece is not None:
                tensors |= {f"{number}.{name}": value for name, value in piece.net.state_dict().items()}
                tensors[f"{number}.frequencies"] = torch.from_numpy(piece.frequencies.astype(np.int32))
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model_id,
            "weights": self.weights_hash,
            "cut": self.cut,
            "pieces": [None if piece is None else asdict(piece.design) for piece in self.pieces],
            "provenance": self.provenance,
        }
        tensors = {name: value.detach().contiguous().cpu() for name, value in tensors.items()}
        return save_tensors(tensors, {"isthmus": json.dumps(meta, sort_keys=True)})

    @cached_property
    def digest(self) -> str:
        """Return a digest of all that decoding depends on; the provenance is not included."""
        return hashlib.sha256(replace(self, provenance={}).to_bytes()).hexdigest()

    def write(self, path: str | Path) -> None:
        """Write the file. Raises SpecError if that fails."""
        write_bytes(path, self.to_bytes())

    @classmethod
    def from_bytes(cls, data: bytes, origin: str) -> LearnedFile:
        """Read a codec from bytes. Raises SpecError that names ``origin`` for data that is not such a file."""
        try:
            if len(data) > MAX_FILE_BYTES:
                raise ValueError(f"larger than any learned codec ({MAX_FILE_BYTES} bytes)")
            meta = _meta(data)
            if meta["format"] != FORMAT or meta["version"] != VERSION:
                raise ValueError(f"its format is not {FORMAT} {VERSION}")
            designs = meta["pieces"]
            if not isinstance(designs, list) or not 1 <= len(designs) <= MAX_PIECES:
                raise ValueError("pieces: expected a list")
            model, weights, cut = (meta[name] for name in ("model", "weights", "cut"))
            if not all(isinstance(one, str) and len(one) <= 4096 for one in (model, weights, cut)):
                raise ValueError("model, weights, cut: expected texts")
            if not isinstance(meta["provenance"], dict):
                raise ValueError("provenance: expected an object")
            tensors = load_tensors(data)
            pieces = tuple(None if one is None else _piece(one, number, tensors) for number, one in enumerate(designs))
            if tensors:
                raise ValueError(f"a tensor of no piece: {min(tensors)!r:.60}")
            return cls(model, weights, cut, pieces, meta["provenance"])
        except Exception as error:  # safetensors raises an error class of its own, torch several
            raise SpecError(f"{origin} is no learned codec: {error!s:.300}") from error


def _meta(data: bytes) -> dict[str, Any]:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(_MAX_META, len(data) - 8):
        raise ValueError("no safetensors file")
    try:
        found = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["isthmus"])
    except MALFORMED as error:
        raise ValueError("no safetensors file of edge-client learn") from error
    if not isinstance(found, dict):
        raise ValueError("no safetensors file of edge-client learn")
    return found


def _piece(data: Any, number: int, tensors: dict[str, torch.Tensor]) -> Piece:
    """Read one piece, taking its tensors out of ``tensors``. Raises ValueError, KeyError, TypeError."""
    if not isinstance(data, dict) or set(data) != set(Design.__dataclass_fields__):
        raise ValueError(f"piece {number}: expected {', '.join(Design.__dataclass_fields__)}")
    design = Design(**{**data, "size": tuple(data["size"]), "positive": bool(data["positive"])})
    with torch.device("meta"):  # of the size in the design, which the file's own tensors must have
        net = Bottleneck(design)
    own = {name: tensors.pop(f"{number}.{name}") for name in net.state_dict()}
    for name, like in net.state_dict().items():
        if own[name].dtype is not torch.float32 or own[name].shape != like.shape:
            raise ValueError(f"piece {number}: {name} is of another shape or type")
        if not bool(torch.isfinite(own[name]).all()):
            raise ValueError(f"piece {number}: {name} holds numbers that are not finite")
    net.load_state_dict(own, assign=True)
    net.requires_grad_(False)
    frequencies = tensors.pop(f"{number}.frequencies").numpy().astype(np.int64)
    if frequencies.shape != (design.symbols, design.levels) or (frequencies < 1).any():
        raise ValueError(f"piece {number}: its frequencies are none")
    if (frequencies.sum(axis=1) != _WHOLE).any():
        raise ValueError(f"piece {number}: its frequencies do not add up to {_WHOLE}")
    return Piece(net.eval(), frequencies)


class LearnedCodec(Codec):
    """The codec of one file. It sends everything raw itself: `at` returns the codec of a piece of its cut."""

    lossless = False
    listed = False

    def __init__(self, file: LearnedFile, origin: str) -> None:
        self.file = file
        self.origin = origin
        self.name = PREFIX + file.digest[:_DIGITS]  # type: ignore[misc]  # of the object: one for each file
        self._pieces = [None if piece is None else _OfPiece(self, n, piece) for n, piece in enumerate(file.pieces)]

    def check_model(self, weights_hash: str) -> None:
        """Raise SpecError if the codec was trained with other weights."""
        if self.file.weights_hash != weights_hash:
            raise SpecError(
                f"{self.origin} was learnt with other weights of {self.file.model_id} "
                f"({self.file.weights_hash[:12]}..., here {weights_hash[:12]}...): edge-client learn makes a new one"
            )

    def at(self, cut: str, number: int) -> Codec:
        own = self._pieces[number] if cut == self.file.cut and 0 <= number < len(self._pieces) else None
        return own or self

    def encode(self, tensor: torch.Tensor, grain: Grain) -> Coded | None:
        return None

    def check(self, params: tuple[Param, ...], dtype: torch.dtype, elements: int, nbytes: int) -> None:
        if len(params) != 5 or not all(type(one) is int and 0 <= one < 1 << 32 for one in params):
            raise ValueError("its parameters are a piece, how memory lies, and three sizes")
        piece, form = self._form(params)
        if dtype not in _FLOATS or not piece.design.takes(*form, elements):
            raise ValueError(f"{elements} elements of {dtype} are never coded so")
        symbols = math.prod(piece.design.symbol_shape(*form))
        if not _least_bytes(symbols) <= nbytes <= 2 * symbols + 4 * -(-symbols // _BLOCK):
            raise ValueError(f"{nbytes} bytes cannot stand for {symbols} symbols")

    def decode(
        self, data: memoryview, params: tuple[Param, ...], dtype: torch.dtype, elements: int
    ) -> torch.Tensor | memoryview:
        piece, (count, height, width) = self._form(params)
        design = piece.design
        shape = design.symbol_shape(count, height, width)
        symbols = torch.from_numpy(piece.coder.unpack(bytes(data), (shape[0], shape[1], shape[2] * shape[3]))).float()
        symbols = symbols.view(shape[:2] if design.kind == "tokens" else shape)
        size = (1, 1) if design.kind == "tokens" else (height, width)
        step = max(1, _WORKING_ELEMENTS // (max(design.hidden, design.channels) * size[0] * size[1]))
        with torch.no_grad():
            rows = torch.cat([piece.net.values_of(part, size) for part in symbols.split(step)])
        found = flat_of(rows, design, (count, height, width), channels_last=params[1] == 1)
        if dtype is torch.float16:
            most = torch.finfo(dtype).max
            found.clamp_(-most, most)
        return found.to(dtype)

    def _form(self, params: tuple[Param, ...]) -> tuple[Piece, tuple[int, int, int]]:
        number, last, count, height, width = (int(one) for one in params)
        piece = self.file.pieces[number] if number < len(self.file.pieces) else None
        if piece is None or last > 1 or (piece.design.kind == "tokens" and (last, height) != (0, 1)):
            raise ValueError(f"its piece {number} has no such form")
        return piece, (count, height, width)


class _OfPiece(Codec):
    """``whole``, applied to one piece of its cut."""

    lossless = False
    listed = False

    def __init__(self, whole: LearnedCodec, number: int, piece: Piece) -> None:
        self.name = whole.name  # type: ignore[misc]
        self._whole, self._number, self._piece = whole, number, piece
        self._elsewhere: dict[torch.device, Bottleneck] = {}
        self._lock = threading.Lock()

    def encode(self, tensor: torch.Tensor, grain: Grain) -> Coded | None:
        design = self._piece.design
        form = design.form_of(grain, tensor.numel())
        if form is None or tensor.dtype not in _FLOATS:
            return None
        values = tensor.to(torch.float32)
        if not bool(torch.isfinite(values).all()):
            return None
        channels_last = design.kind == "map" and grain.inner == 1 and form[1:] != (1, 1)
        values = rows_of(values, design, form, channels_last=channels_last)
        with torch.no_grad():
            symbols = self._net(values.device).levels_of(values).round_().to("cpu", torch.int64)
        coded = self._piece.coder.pack(symbols.reshape(design.symbol_shape(*form)[0], design.symbols, -1).numpy())
        return Coded(memoryview(coded), (self._number, int(channels_last), *form))

    def check(self, params: tuple[Param, ...], dtype: torch.dtype, elements: int, nbytes: int) -> None:
        self._whole.check(params, dtype, elements, nbytes)

    def decode(
        self, data: memoryview, params: tuple[Param, ...], dtype: torch.dtype, elements: int
    ) -> torch.Tensor | memoryview:
        return self._whole.decode(data, params, dtype, elements)

    def _net(self, device: torch.device) -> Bottleneck:
        if device.type == "cpu":
            return self._piece.net
        with self._lock:
            if device not in self._elsewhere:
                own = Bottleneck(self._piece.design)
                own.load_state_dict(self._piece.net.state_dict())
                self._elsewhere[device] = own.requires_grad_(False).to(device)
            return self._elsewhere[device]


def rows_of(
    flat: torch.Tensor, design: Design, form: tuple[int, int, int], *, channels_last: bool = False
) -> torch.Tensor:
    """Return a net's input from a piece as it lies in memory: (N, C, H, W) for maps, (rows, D) for tokens."""
    count, height, width = form
    if design.kind == "tokens":
        return flat.view(count, design.channels, width).transpose(1, 2).reshape(-1, design.channels)
    if channels_last:
        return flat.view(count, height, width, design.channels).permute(0, 3, 1, 2)
    return flat.view(count, design.channels, height, width)


def flat_of(
    rows: torch.Tensor, design: Design, form: tuple[int, int, int], *, channels_last: bool = False
) -> torch.Tensor:
    """Return the contiguous flat tensor of a net's output, the reverse of `rows_of`."""
    count, _, width = form
    if design.kind == "tokens":
        rows = rows.view(count, width, design.channels).transpose(1, 2)
    elif channels_last:
        rows = rows.permute(0, 2, 3, 1)
    return rows.reshape(-1)


def read(path: str | Path) -> LearnedCodec:
    """Read a codec from a file. Raises SpecError that names the file."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}") from error
    return LearnedCodec(LearnedFile.from_bytes(data, str(path)), str(path))
