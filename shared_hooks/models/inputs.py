"""Find a model's input files and their labels, and read tensors from them."""

from __future__ import annotations

import glob
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file

from shared_hooks.config import Table, kind_of, looks_like_target, resolve
from shared_hooks.errors import InputMismatch, SpecError, near

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""A model's arguments: (args, kwargs)."""

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
TENSOR_SUFFIXES = frozenset({".npy", ".safetensors"})

_TRUTH = re.compile(r"_label([^_]+)$")


@dataclass(frozen=True)
class InputItem:
    """One input file. ``truth`` is its label, None if unknown; see `truth_of`."""

    path: Path
    truth: str | None = None

    @property
    def name(self) -> str:
        """The file's name, for tables and messages."""
        return self.path.name

    @property
    def origin(self) -> str:
        """The file's full path."""
        return str(self.path)

    @classmethod
    def of(cls, path: str | Path) -> InputItem:
        """Make the item of a path, with its label."""
        return cls(Path(path), truth_of(Path(path)))


def truth_of(path: Path) -> str | None:
    """Return a file's label: from labels.json beside it ({file name: label}), or ``..._labelTRUTH.png``; or None."""
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
    """Return the input files of a file, a folder (its images and tensors), or a glob pattern; or of several.

    A folder without inputs of its own, but with sub-folders that have some, holds classes: a sub-folder's name is the
    label of its files. Sorted by name inside a pattern, in the order of the patterns; each file ``once``, or as often
    as it is given. Raises InputMismatch if a pattern matches nothing.
    """
    if isinstance(patterns, (str, Path)):
        patterns = [patterns]
    found: list[InputItem] = []
    for pattern in patterns:
        if not str(pattern):
            raise InputMismatch("no such input: an empty path")
        found += _classes(Path(pattern)) or [InputItem.of(path) for path in _paths(Path(pattern))]
    return list({item.path: item for item in found}.values()) if once else found


def _classes(folder: Path) -> list[InputItem]:
    """Return the inputs of a folder of classes; nothing for another path."""
    if not folder.is_dir() or _inside(folder):
        return []
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    return [InputItem(path, one.name) for one in classes for path in _inside(one)]


def _inside(folder: Path) -> list[Path]:
    wanted = IMAGE_SUFFIXES | TENSOR_SUFFIXES
    return sorted(path for path in folder.iterdir() if path.is_file() and path.suffix.lower() in wanted)


def _paths(pattern: Path) -> list[Path]:
    wanted = IMAGE_SUFFIXES | TENSOR_SUFFIXES
    if pattern.is_file():
        return [pattern]
    if pattern.is_dir():
        paths = _inside(pattern)
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
    """Read the tensors of a .npy or .safetensors file as inputs, unchanged, including their batch dimension.

    .npy is one positional input. In a .safetensors file, tensors named "0", "1", ... are positional; a single one of
    any other name is positional too, unless it is in ``keywords`` (the names in the model's example); all others are
    keyword inputs. Raises InputMismatch.
    """
    if path.suffix.lower() == ".npy":
        return (_read_npy(path, path),), {}
    try:
        return _arranged(load_file(path), path, keywords)
    except (OSError, SafetensorError) as error:
        raise InputMismatch(f"{path} cannot be read as safetensors: {error}") from error


def tensors_of_bytes(data: bytes, suffix: str, name: str, keywords: frozenset[str] = frozenset()) -> Inputs:
    """Read tensors as `read_tensors` does, from a file's bytes."""
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
"""Kinds of arrays accepted: booleans and numbers. Text and records may announce elements that take no bytes in the
file.
"""
_MAX_NPY_HEADER = 10_000


def _read_npy(source: Path | io.BytesIO, path: Path | str) -> torch.Tensor:
    """Read the .npy format (`numpy.lib.format`), allocating nothing before the header has been checked."""
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


# The example input of a spec: both sides plan with it before the first real input.


_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float32", "float64", "float16", "bfloat16", "complex64", "bool"),
        *("int64", "int32", "int16", "int8", "uint8"),
    )
}
_MAX_ELEMENTS = 2**31


@dataclass(frozen=True)
class TensorSource:
    """A generated tensor: normally distributed (floats), uniform in [low, high) (integers), or filled with ``fill``."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    low: int = 0
    high: int = 2
    fill: float | None = None

    @classmethod
    def from_table(cls, table: Table) -> TensorSource:
        """Read an example such as ``{shape = [1, 3, 224, 224], dtype = "float32"}``. Raises SpecError."""
        shape = table.take_list("shape", int, "a list of sizes, such as [1, 3, 224, 224]")
        if shape is None:
            table.fail("shape", "missing; expected a list of sizes, such as [1, 3, 224, 224]")
        elements = 1
        for size in shape:
            elements *= size
        if any(size < 0 for size in shape) or elements > _MAX_ELEMENTS:
            table.fail("shape", f"expected sizes of at least 0 and at most {_MAX_ELEMENTS} elements, found {shape}")
        dtype = _DTYPES[table.choice("dtype", _DTYPES, "float32")]
        low, high = table.take("low", int), table.take("high", int)
        fill = table.take("fill", float)
        if not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool) and high is None and fill is None:
            table.fail("high", "missing; integers are drawn from [low, high), or give fill")
        if high is not None and high <= (low or 0):
            table.fail("high", f"must be above low ({low or 0}), found {high}")
        table.done()
        return cls(tuple(shape), dtype, low or 0, 2 if high is None else high, fill)

    def make(self, generator: torch.Generator) -> torch.Tensor:
        """Return the tensor, on the CPU."""
        if self.fill is not None:
            return torch.full(self.shape, self.fill).to(self.dtype)
        if self.dtype.is_complex:
            return torch.randn(self.shape, generator=generator, dtype=self.dtype)
        if self.dtype.is_floating_point:
            # Drawn in float32, so that a spec with another dtype differs by rounding only.
            return torch.randn(self.shape, generator=generator).to(self.dtype)
        return torch.randint(self.low, self.high, self.shape, generator=generator).to(self.dtype)


@dataclass(frozen=True)
class MadeExample:
    """An [example] whose tensors are described in the spec."""

    args: tuple[TensorSource, ...]
    kwargs: Mapping[str, TensorSource]
    seed: int

    def __call__(self) -> Inputs:
        """Return the inputs, the same on every call."""
        generator = torch.Generator().manual_seed(self.seed)
        return (
            tuple(source.make(generator) for source in self.args),
            {name: source.make(generator) for name, source in self.kwargs.items()},
        )


Example = Callable[[], Inputs]


def read_example(
    table: Table, folder: Path, preprocess: Callable[[Path], Inputs]
) -> tuple[Example | None, frozenset[str]]:
    """Return the spec's ``example`` and the keyword names in it.

    A table describes tensors; a string is a file (.npy, .safetensors, or an image for ``preprocess``) beside the spec,
    or ``module:callable``. Raises SpecError.
    """
    where = f"{table.origin}: {table.name('example')}"
    if "example" not in table:
        table.take_any("example")
        return None, frozenset()
    value = table.take_any("example")
    if isinstance(value, str):
        suffix = Path(value).suffix.lower()
        path = folder / value
        if suffix in TENSOR_SUFFIXES | IMAGE_SUFFIXES:
            if not path.is_file():
                table.fail("example", f"no such file: {path}")
            return (lambda: read_tensors(path) if suffix in TENSOR_SUFFIXES else preprocess(path)), frozenset()
        if looks_like_target(value):
            return (lambda: inputs_of(resolve(value, folder, where)(), where)), frozenset()
    if not isinstance(value, dict):
        table.fail(
            "example",
            "expected a table of tensors, a .npy, .safetensors or image file,"
            f' or "module:callable", found {kind_of(value)}',
        )
    inner = Table(value, table.origin, table.name("example"))
    seed = inner.take("seed", int)
    listed = inner.take_list("args", dict, "a list of tables, each with shape and dtype") or []
    args = tuple(
        TensorSource.from_table(Table(item, table.origin, f"{inner.name('args')}[{position}]"))
        for position, item in enumerate(listed)
    )
    kwargs: dict[str, TensorSource] = {}
    named = inner.table("kwargs")
    for key, item in named.rest().items() if named else ():
        if not isinstance(item, dict):
            inner.fail(
                f"kwargs.{key}",
                f"expected a table with shape and dtype, found {kind_of(item)}; constants go into [call_kwargs]",
            )
        kwargs[key] = TensorSource.from_table(Table(item, table.origin, f"{inner.name('kwargs')}.{key}"))
    inner.done()
    if not args and not kwargs:
        table.fail("example", "describes no tensor; expected [[example.args]] or [example.kwargs]")
    return MadeExample(args, kwargs, seed or 0), frozenset(kwargs)


def example_like(shape: tuple[int, ...], dtype: torch.dtype, keyword: str | None) -> tuple[Example, frozenset[str]]:
    """Return an example for a spec without one whose preprocessing makes tensors of a fixed shape."""
    made = TensorSource(shape, dtype, 0, 256)
    if keyword is None:
        return MadeExample((made,), {}, 0), frozenset()
    return MadeExample((), {keyword: made}, 0), frozenset((keyword,))


def entry_of(text: str, option: str = "example") -> object:
    """Parse a command line's example: ``1,3,224,224[:dtype]`` (or 1x3x224x224), a file, or ``module:callable``.

    Raises SpecError.
    """
    sizes, _, dtype = text.partition(":")
    parts = re.split("[,x]", sizes)
    if all(part.strip().isdecimal() for part in parts):
        if (dtype or "float32") not in _DTYPES:
            raise SpecError(f"{option} {text}: {dtype} is no dtype: {', '.join(_DTYPES)}.{near(dtype, _DTYPES)}")
        tensor = {"shape": [int(part) for part in parts], "dtype": dtype or "float32", "low": 0, "high": 2}
        return {"args": [tensor]}
    if looks_like_target(text):
        return text
    path = Path(text)
    if path.suffix.lower() not in TENSOR_SUFFIXES | IMAGE_SUFFIXES:
        raise SpecError(
            f"{option} {text}: expected sizes such as 1,3,224,224 or 1,16:int64, a .npy, .safetensors or image file, "
            "or module:callable"
        )
    if not path.is_file():
        raise SpecError(f"{option} {text}: no such file")
    return str(path.resolve())


def inputs_of_text(text: str) -> Inputs:
    """Parse an example to inputs for a model without a spec, so without images."""

    def no_image(path: Path) -> Inputs:
        raise SpecError(f"example {path}: without a spec it is unknown how to read an image; give sizes or a .npy file")

    example, _ = read_example(Table({"example": entry_of(text, "example")}, "example"), Path.cwd(), no_image)
    assert example is not None
    return example()


def inputs_of(value: object, where: str) -> Inputs:
    """Return a callable's result as (args, kwargs): a tensor, a tuple, a dictionary, or such a pair."""
    if isinstance(value, torch.Tensor):
        return (value,), {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple) and isinstance(value[1], dict):
        return value[0], dict(value[1])
    if isinstance(value, (tuple, list)):
        return tuple(value), {}
    if isinstance(value, Mapping):
        return (), dict(value)
    raise SpecError(f"{where}: expected a tensor, a tuple, a dictionary or (args, kwargs), got {type(value).__name__}")


def to_device(value: Any, device: torch.device) -> Any:
    """Move every tensor in nested tuples, lists and dictionaries to ``device``."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(to_device(item, device) for item in value)
    return value
