"""The files a model is fed with: which they are, what the truth of each is, and tensors read from them."""

from __future__ import annotations

import glob
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file

from shared_hooks.errors import InputMismatch, near

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""What a model is called with: (args, kwargs)."""

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
TENSOR_SUFFIXES = frozenset({".npy", ".safetensors"})

_TRUTH = re.compile(r"_label([^_]+)$")


@dataclass(frozen=True)
class InputItem:
    """One input file. ``truth`` is the label it should get, None where nothing says so; see `truth_of`."""

    path: Path
    truth: str | None = None

    @property
    def name(self) -> str:
        """The file's name, for tables and messages."""
        return self.path.name

    @property
    def origin(self) -> str:
        """The file, in full."""
        return str(self.path)

    @classmethod
    def of(cls, path: str | Path) -> InputItem:
        """The item of a path, its truth looked up."""
        return cls(Path(path), truth_of(Path(path)))


def truth_of(path: Path) -> str | None:
    """The truth of a file: from labels.json beside it ({file name: label}), or ``..._labelTRUTH.png``; or None."""
    listing = path.parent / "labels.json"
    if listing.is_file():
        try:
            known = json.loads(listing.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputMismatch(f"{listing} cannot be read as JSON: {error}") from error
        if isinstance(known, dict) and path.name in known:
            return str(known[path.name])
    found = _TRUTH.search(path.stem)
    return found.group(1) if found else None


def find_inputs(patterns: str | Path | Sequence[str | Path], *, once: bool = True) -> list[InputItem]:
    """The input files of a file, a folder (its images and tensors, no sub-folders), or a glob pattern; or of several.

    Sorted by name inside one pattern, in the order of the patterns; each file ``once``, or as often as it is given.
    Raises InputMismatch when a pattern finds nothing.
    """
    if isinstance(patterns, (str, Path)):
        patterns = [patterns]
    found: list[Path] = []
    for pattern in patterns:
        if not str(pattern):
            raise InputMismatch("no such input: an empty path")
        found += _paths(Path(pattern))
    return [InputItem.of(path) for path in (dict.fromkeys(found) if once else found)]


def _paths(pattern: Path) -> list[Path]:
    wanted = IMAGE_SUFFIXES | TENSOR_SUFFIXES
    if pattern.is_file():
        return [pattern]
    if pattern.is_dir():
        paths = sorted(path for path in pattern.iterdir() if path.is_file() and path.suffix.lower() in wanted)
        if not paths:
            raise InputMismatch(f"{pattern} holds no input; looked for {', '.join(sorted(wanted))}")
        return paths
    if glob.has_magic(str(pattern)):
        matches = (Path(match) for match in glob.glob(str(pattern), recursive=True))
        paths = sorted(path for path in matches if path.is_file() and path.suffix.lower() in wanted)
        if not paths:
            raise InputMismatch(f'no input file matches "{pattern}"')
        return paths
    siblings = [path.name for path in pattern.parent.iterdir()] if pattern.parent.is_dir() else []
    words = " A text names a file; of words give what the model's tokenizer makes." if " " in pattern.name else ""
    raise InputMismatch(f"no such input: {pattern}.{near(pattern.name, siblings) or words}")


def read_tensors(path: Path, keywords: frozenset[str] = frozenset()) -> Inputs:
    """The tensors of a .npy or .safetensors file as inputs, unchanged (the batch dimension is the file's own business).

    .npy is one positional input. In a .safetensors file, tensors named "0", "1", ... are positional; a single one of
    any other name is positional too, unless ``keywords`` (the names the model's example uses) has it; all others
    are keyword inputs. Raises InputMismatch.
    """
    if path.suffix.lower() == ".npy":
        return (_read_npy(path, path),), {}
    try:
        return _arranged(load_file(path), path, keywords)
    except (OSError, SafetensorError) as error:
        raise InputMismatch(f"{path} cannot be read as safetensors: {error}") from error


def tensors_of_bytes(data: bytes, suffix: str, name: str, keywords: frozenset[str] = frozenset()) -> Inputs:
    """As `read_tensors`, of the bytes of such a file."""
    if suffix == ".npy":
        return (_read_npy(io.BytesIO(data), name),), {}
    try:
        return _arranged(load(data), name, keywords)
    except SafetensorError as error:
        raise InputMismatch(f"{name} cannot be read as safetensors: {error}") from error


def _arranged(tensors: dict[str, torch.Tensor], path: Path | str, keywords: frozenset[str]) -> Inputs:
    if not tensors:
        raise InputMismatch(f"{path} holds no tensor")
    if len(tensors) == 1 and not tensors.keys() & keywords:
        return tuple(tensors.values()), {}
    positions = sorted(int(name) for name in tensors if name.isdecimal() and name.isascii())
    if positions != list(range(len(positions))):
        raise InputMismatch(f"{path}: positional tensors must be named 0, 1, ... without a gap, found {positions}")
    args = tuple(tensors.pop(str(position)) for position in positions)
    return args, tensors


_NPY_KINDS = "biufc"
"""Kinds of arrays: truth values and numbers. Text and records may announce elements that take no room in the file."""
_MAX_NPY_HEADER = 10_000


def _read_npy(source: Path | io.BytesIO, path: Path | str) -> torch.Tensor:
    """By the format that `numpy.lib.format` documents. Nothing is made before the header is found to be true."""
    try:
        data = source.read_bytes() if isinstance(source, Path) else source.getvalue()
        file = io.BytesIO(data)
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(file, max_header_size=_MAX_NPY_HEADER)
        if dtype.kind not in _NPY_KINDS or not dtype.itemsize:
            raise InputMismatch(f"{path} cannot be read as a .npy array: it is of {dtype.str}; expected numbers")
        announced, there = math.prod(shape) * dtype.itemsize, len(data) - file.tell()
        if any(size < 0 for size in shape) or announced > there:
            raise InputMismatch(f"{path}: a .npy file of {len(data)} bytes announces an array of {announced}")
        flat = np.frombuffer(data, dtype, math.prod(shape), file.tell())
        array = flat.reshape(shape[::-1]).T if is_fortran else flat.reshape(shape)
        # torch takes native byte order only, and from_numpy warns about read-only memory.
        return torch.from_numpy(np.array(array, dtype=dtype.newbyteorder("="), order="C"))
    except (OSError, ValueError, TypeError, EOFError, SyntaxError, MemoryError, RecursionError, TokenError) as error:
        raise InputMismatch(f"{path} cannot be read as a .npy array: {error!s:.200}") from error
