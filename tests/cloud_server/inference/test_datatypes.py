"""Elements as bytes and back, and what is no element."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cloud_server.inference.sending import DTYPES, NUMPY, count, dtype_of, pack, unpack
from shared_hooks.errors import BadFrame, InputMismatch, TooLarge

VALUES: dict[str, list[Any]] = {
    "BOOL": [True, False],
    "UINT8": [0, 255],
    "UINT16": [0, 65535],
    "UINT32": [0, 2**32 - 1],
    "UINT64": [0, 2**64 - 1],
    "INT8": [-128, 127],
    "INT16": [-(2**15), 2**15 - 1],
    "INT32": [-(2**31), 2**31 - 1],
    "INT64": [-(2**63), 2**63 - 1],
    "FP16": [0.5, 65504.0],
    "FP32": [0.5, 3.4028234663852886e38],
    "FP64": [1e308, 2],
}


@pytest.mark.parametrize("name", NUMPY)
def test_there_and_back(name: str) -> None:
    values = VALUES[name]
    data = pack(values, name, "x")
    assert data.nbytes == 2 * DTYPES[name].itemsize and list(unpack(data, name)) == [values]
    assert pack([], name, "x").nbytes == 0 and not list(unpack(memoryview(b""), name))


def test_not_a_number_is_one_where_it_can_be_said() -> None:
    (found,) = unpack(pack([math.nan, math.inf], "FP32", "x"), "FP32")
    assert math.isnan(found[0]) and found[1] == math.inf
    with pytest.raises(InputMismatch, match="does not fit"):
        pack([math.inf], "FP32", "x", finite=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BOOL", 1),
        ("INT8", 128),
        ("UINT8", -1),
        ("INT64", 2**63),
        ("UINT64", 2**70),
        ("INT32", 1.0),
        ("INT32", True),
        ("FP32", "1"),
        ("FP32", True),
        ("FP16", 65520.0),
        ("FP32", 1e39),
        ("FP64", 10**400),
        ("FP32", None),
        ("BF16", 1.0),
        ("BYTES", "a"),
        ("", 1),
    ],
)
def test_invalid_elements(name: str, value: Any) -> None:
    with pytest.raises(InputMismatch):
        pack([value], name, "x")


def test_shapes() -> None:
    assert count([], "x") == 1 and count([0, 3], "x") == 0 and count([2, 3], "x") == 6
    for shape in ([-1], [1] * 33):
        with pytest.raises(BadFrame, match="is none"):
            count(shape, "x")
    for shape in ([1 << 40], [0, 1 << 62], [1 << 20, 1 << 20]):
        with pytest.raises(TooLarge):
            count(shape, "x")
    assert dtype_of("BF16", "x") is torch.bfloat16
    with pytest.raises(InputMismatch, match="datatype 'fp32'"):
        dtype_of("fp32", "x")
