"""The example input of a spec: what both sides plan on before the first real input comes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shared_hooks.config import Table, kind_of, looks_like_target, resolve
from shared_hooks.errors import SpecError, near
from shared_hooks.models.inputs import IMAGE_SUFFIXES, TENSOR_SUFFIXES, Inputs, read_tensors

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
    """One made-up tensor: normally distributed (floats), uniform in [low, high) (integers), or ``fill`` everywhere."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    low: int = 0
    high: int = 2
    fill: float | None = None

    @classmethod
    def from_table(cls, table: Table) -> TensorSource:
        """An example from a table like ``{shape = [1, 3, 224, 224], dtype = "float32"}``. Raises SpecError."""
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
        """The tensor, on the CPU."""
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
    """[example] with tensors described in the spec itself."""

    args: tuple[TensorSource, ...]
    kwargs: Mapping[str, TensorSource]
    seed: int

    def __call__(self) -> Inputs:
        """The inputs; the same on every call."""
        generator = torch.Generator().manual_seed(self.seed)
        return (
            tuple(source.make(generator) for source in self.args),
            {name: source.make(generator) for name, source in self.kwargs.items()},
        )


Example = Callable[[], Inputs]


def read_example(
    table: Table, folder: Path, preprocess: Callable[[Path], Inputs]
) -> tuple[Example | None, frozenset[str]]:
    """The spec's ``example`` and the keyword names it is known to use.

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
    """What `read_example` gives for a spec without ``example`` whose preprocessing makes tensors of one form."""
    made = TensorSource(shape, dtype, 0, 256)
    if keyword is None:
        return MadeExample((made,), {}, 0), frozenset()
    return MadeExample((), {keyword: made}, 0), frozenset((keyword,))


def entry_of(text: str, option: str = "example") -> object:
    """The spec's ``example`` entry for ``1,3,224,224[:dtype]`` (or 1x3x224x224), a file, or ``module:callable``, as a
    command line has it. Raises SpecError.
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
    """The same as inputs, for a model without a spec: no image."""

    def no_image(path: Path) -> Inputs:
        raise SpecError(f"example {path}: without a spec nothing says how an image is read; give sizes or a .npy file")

    example, _ = read_example(Table({"example": entry_of(text, "example")}, "example"), Path.cwd(), no_image)
    assert example is not None
    return example()


def inputs_of(value: object, where: str) -> Inputs:
    """What a user's callable returned, as (args, kwargs): of a tensor, a tuple, a dictionary, or such a pair."""
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
    """Every tensor in nested tuples, lists and dictionaries, moved."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(to_device(item, device) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(to_device(item, device) for item in value)
    return value
