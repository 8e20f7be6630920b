"""Descriptions of cuts: counted at what they become, and shared fairly."""

from __future__ import annotations

import dataclasses
import gc
import json
import tracemalloc
from typing import Any

import pytest

from cloud_server.limits import Limits
from cloud_server.streams import CrossingCache
from shared_hooks.crossing import decode, decoded_bytes, digest_of
from shared_hooks.sharing import Owner
from tests.cloud_server.fakes import make_crossing

HONEST, HOSTILE = Owner("address test", "honest"), Owner("address test", "hostile")
EMPTY: dict[str, Any] = json.loads(make_crossing(0).to_bytes())
COUNT = 5000


def described(**parts: Any) -> bytes:
    return json.dumps({**EMPTY, **parts}, separators=(",", ":"), ensure_ascii=False).encode()


SHAPES = {
    "empty lists": described(inputs=[[[]] * COUNT, []]),
    "nested lists": described(inputs=[[[[]]] * COUNT, []]),
    "empty objects": described(inputs=[[{}] * COUNT, []]),
    "objects": described(inputs=[[{"a": 1}] * COUNT, []]),
    "numbers": described(inputs=[[10**9 + number for number in range(COUNT)], []]),
    "texts": described(inputs=[[f"{number}" for number in range(COUNT)], []]),
    "wide texts": described(inputs=[["a" * 900 + "😀"] * 100, []]),
    "settings": described(context={f"k{number}": 0 for number in range(COUNT)}),
    "slots": described(slots=[["uint8", 0, False, []]] * COUNT),
    "fills": described(slots=[["uint8", 0, False, []]], fills=[[["", 0, 0], 0, 0]] * COUNT),
    "reads": described(reads=[[["", 0, 0], "", 0]] * COUNT),
}


@pytest.mark.parametrize("data", SHAPES.values(), ids=SHAPES.keys())
def test_crossing_counts_its_decoded_size(data: bytes) -> None:
    for _ in range(3):  # other threads of the process may allocate meanwhile, too
        gc.collect()
        tracemalloc.start()
        crossing = decode(data, remember=False)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert crossing.to_bytes() == data
        del crossing
        if taken <= 1.1 * decoded_bytes(data):
            return
    pytest.fail(f"{taken} bytes, counted as {decoded_bytes(data)}")


def test_kept_crossings_are_bounded_by_their_decoded_size() -> None:
    cache = CrossingCache(dataclasses.replace(Limits(), max_cuts_bytes=1 << 20))
    for number in range(20):
        data = described(inputs=[[[]] * COUNT + [number], []])
        cache.add(digest_of(data), data, HOSTILE)
    assert cache.nbytes <= 1 << 20 and len(cache) == (1 << 20) // decoded_bytes(data)


def test_a_thousand_small_ones_in_a_loop_push_out_nobody_elses() -> None:
    cache, honest = CrossingCache(dataclasses.replace(Limits(), max_cuts=64)), make_crossing(8)
    cache.add(honest.digest, honest.to_bytes(), HONEST)
    for number in range(300):
        other = make_crossing(1, f"layer{number}")
        cache.add(other.digest, other.to_bytes(), HOSTILE)
    assert cache.get(honest.digest, HONEST) is not None and len(cache) == 64
