"""The choice: for every tensor the codec with which it is there, decoded, the soonest. Pure.

    of one tensor: encode + its bytes on the link + decode

The link is a curve, not a rate: so tensors are priced at what a byte costs where all are sent as they are, and again
where all are as small as they can be. Of these two ways, and raw, the one that the curve says is fastest is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

RAW = "raw"


class Cost(NamedTuple):
    """Of one tensor with one codec: nanoseconds here, bytes, nanoseconds there."""

    encode_ns: float
    nbytes: float
    decode_ns: float


def pick(tensors: Sequence[Mapping[str, Cost]], up_ns: Callable[[float], float]) -> tuple[str, ...]:
    """Of each tensor its codec, by name; each may go `RAW`. ``up_ns``: what so many bytes take on their way up.

    Where several take as long, the first of them.
    """
    if not tensors:
        return ()
    raw = tuple(RAW for _ in tensors)
    most = sum(costs[RAW].nbytes for costs in tensors)
    least = sum(min(one.nbytes for one in costs.values()) for costs in tensors)
    fixed = up_ns(0)
    prices = [(up_ns(nbytes) - fixed) / nbytes for nbytes in (most, least) if nbytes > 0]
    ways = dict.fromkeys([raw, *(tuple(_soonest(costs, price) for costs in tensors) for price in prices)])
    return min(ways, key=lambda way: total(tensors, way, up_ns))


def total(tensors: Sequence[Mapping[str, Cost]], way: Sequence[str], up_ns: Callable[[float], float]) -> float:
    """Nanoseconds until all tensors are there, decoded, one thing after the other."""
    costs = [known[name] for known, name in zip(tensors, way, strict=True)]
    return sum(one.encode_ns + one.decode_ns for one in costs) + up_ns(sum(one.nbytes for one in costs))


def _soonest(costs: Mapping[str, Cost], ns_per_byte: float) -> str:
    return min(costs, key=lambda name: costs[name].encode_ns + costs[name].decode_ns + costs[name].nbytes * ns_per_byte)
