"""`Speeds`: what codecs take on this machine, by kind of tensor, and how small they make the tensors of each cut.

A *kind* is a dtype and a class of size (powers of four bytes): a codec's time for a byte hardly depends on more. What
is left of a tensor depends on what is in it, and is kept for each *place*: a cut and the number of a piece there.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import MutableMapping
from typing import Final, NamedTuple, TypeVar

from edge_client.choosing.pick import Cost
from edge_client.planning.tracker import Tracker

PLACES: Final = 4096
"""Remembered; what was used longest ago is measured again."""
SMALL_NS: Final = 20_000.0
"""Added to what decoding takes, there and here, before they are compared: short times say little."""
_TINY: Final = 1e-6
Key = TypeVar("Key")


class Kind(NamedTuple):
    """``size``: the power of four that the bytes are below."""

    dtype: str
    size: int

    @classmethod
    def of(cls, dtype: str, nbytes: int) -> Kind:
        return cls(dtype, math.ceil(math.log(max(1, nbytes), 4)))


Place = tuple[str, int]
"""A cut's name, and the number of a piece there."""


class Speeds:
    """Any thread may call. Times of decoding are this machine's until a server has told its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._encode: dict[tuple[str, Kind], Tracker] = {}
        self._decode: dict[tuple[str, Kind], Tracker] = {}
        self._ratio: OrderedDict[tuple[str, Place, Kind], Tracker] = OrderedDict()
        self._server = Tracker(1.0)

    @property
    def server_factor(self) -> float:
        """How many times as long the server takes to decode."""
        return self._server.value

    def knows(self, codec: str, place: Place, kind: Kind) -> bool:
        """Whether `cost` has an answer."""
        return (codec, place, kind) in self._ratio

    def least_ns(self, codec: str, kind: Kind, nbytes: int) -> float:
        """What encoding and decoding alone take, whatever is left of it; 0 where nothing of the kind was seen."""
        with self._lock:
            known = [speeds.get((codec, kind)) for speeds in (self._encode, self._decode)]
            return sum(nbytes * one.value for one in known if one is not None)

    def cost(self, codec: str, place: Place, kind: Kind, nbytes: int) -> Cost | None:
        """Of a tensor of ``nbytes`` there; None where it was never encoded."""
        with self._lock:
            ratio = self._ratio.get((codec, place, kind))
            if ratio is None:
                return None
            self._ratio.move_to_end((codec, place, kind))
            encode, decode = self._encode.get((codec, kind)), self._decode.get((codec, kind))
            return Cost(
                nbytes * encode.value if encode else 0.0,
                nbytes * ratio.value,
                nbytes * decode.value * self._server.value if decode else 0.0,
            )

    def encoded(self, codec: str, place: Place, kind: Kind, nbytes: int, left: int, ns: float) -> None:
        """A tensor of ``nbytes`` became ``left`` bytes in ``ns``."""
        with self._lock:
            _follow(self._encode, (codec, kind), ns / nbytes)
            _follow(self._ratio, (codec, place, kind), left / nbytes)
            if len(self._ratio) > PLACES:
                self._ratio.popitem(last=False)

    def decoded(self, codec: str, kind: Kind, nbytes: int, ns: float) -> None:
        """... and was decoded on this machine."""
        with self._lock:
            _follow(self._decode, (codec, kind), ns / nbytes)

    def told(self, expected_ns: float, server_ns: float) -> None:
        """A server took so long to decode what `cost` said would take ``expected_ns``."""
        with self._lock:
            here = expected_ns / max(self._server.value, _TINY)
            self._server.observe((server_ns + SMALL_NS) / (here + SMALL_NS))


def _follow(known: MutableMapping[Key, Tracker], key: Key, value: float) -> None:
    value = max(value, _TINY)
    tracker = known.get(key)
    if tracker is None:
        known[key] = Tracker(value)
    else:
        tracker.observe(value)
