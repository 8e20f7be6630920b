"""A parcel made section by section, in any order, is read like any other; a forged order is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shared_hooks.codecs import CODECS
from shared_hooks.crossing import Packing, Parcel
from shared_hooks.errors import BadFrame, IsthmusError
from tests.zoo.compare import same

LOSSLESS = [codec for codec in CODECS.values() if codec.lossless]


@given(st.data())
def test_any_order_of_any_tensors(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 5))
    shapes = data.draw(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=count, max_size=count))
    tensors = [torch.randn(tuple(shape)).relu() for shape in shapes]
    packing = Packing()
    for number in data.draw(st.permutations(range(count))):
        before = packing.nbytes
        added = packing.add(number, tensors[number], data.draw(st.sampled_from(LOSSLESS)))
        assert packing.nbytes - before == sum(buffer.nbytes for buffer in added)
    parcel = Parcel.packed(packing, ["meta"], tensors)
    payload = bytearray(b"".join(parcel.buffers))
    assert Parcel.check_header(parcel.header, 1 << 20) == parcel.nbytes == len(payload)
    meta, found = Parcel.tensors(parcel.header, payload)
    assert meta == ["meta"] and same(found, tensors)


def test_in_order_it_is_the_parcel_that_older_versions_read() -> None:
    tensors = [torch.arange(9.0), torch.ones(3, 3)]
    packing = Packing()
    for number, tensor in enumerate(tensors):
        packing.add(number, tensor, CODECS["lz4"])
    parcel = Parcel.packed(packing, None, tensors)
    whole = Parcel.of_tensors(None, tensors, "lz4")
    assert parcel.header == whole.header and b"order" not in parcel.header
    assert b"".join(parcel.buffers) == b"".join(whole.buffers)


def forged(order: Any) -> bytes:
    packing = Packing()
    for number in (1, 0, 2):
        packing.add(number, torch.full((4,), float(number)), CODECS["raw"])
    body = json.loads(packing.header(None)[8:])
    assert body["order"] == [1, 0, 2]
    text = json.dumps({**body, "order": order}).encode()
    return xxhash.xxh3_64_intdigest(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "order", [[1, 0], [1, 0, 0], [1, 0, 3], [1, 0, -1], [1, 0, True], [1.0, 0, 2], "102", {"0": 1}, 5, [[1], 0, 2], []]
)
def test_an_order_that_is_none_is_refused(order: Any) -> None:
    with pytest.raises(BadFrame, match="order"):
        Parcel.check_header(forged(order), 1 << 20)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], None])
def test_another_order_is_found_out_by_the_checksums(order: Any) -> None:
    payload = bytearray().join(torch.full((16,), float(number)).numpy().tobytes() for number in (1, 0, 2))
    with pytest.raises(IsthmusError, match="altered"):
        Parcel.tensors(forged(order), payload)


def test_tensor_written_since_is_not_held() -> None:
    packing, tensor = Packing(), torch.zeros(3, 4)[:, 1:]
    packing.hold(0, tensor)
    assert packing.holds(0, tensor) and packing.holds(0, tensor.clone()) and not packing.holds(1, tensor)
    tensor[2, 2] = -0.0
    assert not packing.holds(0, tensor)
