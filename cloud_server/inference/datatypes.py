"""The protocol's datatypes: names, and elements as bytes (little endian, row-major)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from shared_hooks.errors import BadFrame, InputMismatch, TooLarge

DTYPES = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "UINT16": torch.uint16,
    "UINT32": torch.uint32,
    "UINT64": torch.uint64,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "FP32": torch.float32,
    "FP64": torch.float64,
    "BF16": torch.bfloat16,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
NUMPY: dict[str, Any] = {
    "BOOL": np.bool_,
    **{f"{sign}INT{bits}": f"<{sign.lower() or 'i'}{bits // 8}" for sign in ("", "U") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)},
}

MOST = 1 << 40
"""Elements of a shape, those of size 0 counted as 1."""
AT_ONCE = 4096
"""Elements that become Python's own in one go; between two, other threads have their turn."""


def dtype_of(name: str, where: str) -> torch.dtype:
    """Raises InputMismatch for what is no datatype of tensors here."""
    if name not in DTYPES:
        raise InputMismatch(f"{where}: datatype {name[:40]!r}; there are {', '.join(DTYPES)}")
    return DTYPES[name]


def count(shape: Sequence[int], where: str) -> int:
    """Elements of a shape that a stranger gives. Raises BadFrame."""
    if len(shape) > 32 or any(size < 0 for size in shape):
        raise BadFrame(f"{where}: the shape {list(shape)[:32]} is none: up to 32 sizes that are not negative")
    if math.prod(max(size, 1) for size in shape) >= MOST:
        raise TooLarge(f"{where}: the shape {list(shape)} is of absurd size")
    return math.prod(shape)


def pack(values: Sequence[Any], datatype: str, where: str, *, finite: bool = False) -> memoryview:
    """Numbers or truth values as bytes. Raises InputMismatch for other values, and for numbers that do not fit.

    ``finite``: where they came from cannot say others, so one that is not was too large to be read.
    """
    kind = NUMPY.get(datatype)
    if kind is None:
        raise InputMismatch(f"{where}: elements of datatype {datatype[:40]!r} come as bytes only")
    wanted: tuple[type, ...] = (bool,) if datatype == "BOOL" else (int,) if "INT" in datatype else (int, float)
    if any(type(value) not in wanted for value in values):
        raise InputMismatch(f"{where}: an element is no {datatype}")
    try:
        with np.errstate(over="ignore"):
            found = np.array(values, dtype=kind)
    except (OverflowError, ValueError) as error:
        raise InputMismatch(f"{where}: an element does not fit into {datatype}") from error
    if datatype.startswith("FP") and not np.isfinite(found).all() and (finite or np.isfinite(values).all()):
        raise InputMismatch(f"{where}: an element does not fit into {datatype}")
    return memoryview(found.tobytes())


def unpack(data: memoryview, datatype: str) -> Iterator[list[Any]]:
    """The reverse of `pack`, `AT_ONCE` elements at a time. Raises KeyError where elements come as bytes only."""
    found = np.frombuffer(data, dtype=NUMPY[datatype])
    return (found[at : at + AT_ONCE].tolist() for at in range(0, len(found), AT_ONCE))
