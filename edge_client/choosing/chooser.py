"""`Chooser`: chooses the codec of every tensor of one client; it measures what it does not know, and learns from
answers.

At a new place (a cut, and a piece of it) it encodes and decodes the piece once with every codec that may be used there,
unless that alone would take longer than sending it raw. That request bears the cost.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple, TypeVar

import torch

from edge_client.planning.codecs import Codecs
from edge_client.planning.link import Curve, Link, LinkEstimate, Tracker
from shared_hooks.codecs import CODECS, Codec, Coded, Grain, Param, is_offered
from shared_hooks.codecs import RAW as RAW_CODEC
from shared_hooks.crossing import EarlyOutput, Parcel
from shared_hooks.tensors import dtype_name

# `Belief`: the link as estimated by a client that stays at one cut.
#
# There requests have nearly the same size, so their times do not separate a slow link from a long one: bandwidth and
# round trip are distinguished by probes alone. Every request takes about a constant time beyond a probe's prediction
# (threads, a busy machine); that is tracked, and where it suddenly changes the link is probed again. Pure: the time
# is passed in.


UNKNOWN: Final = Link(Curve.line(1e6, 1e9 / 8), Curve.line(0.0, 1e9 / 8), "not known yet")
"""Used until the first answer, if no probe was possible."""
LARGEST: Final = 128 << 10
LEAST: Final = 8 << 10
SHARE: Final = 0.1
"""The share of a second that a probe's largest round may take on the link."""
SOON: Final = 1.0
"""The least seconds between two probes."""
AGAIN: Final = 10.0
"""The most seconds between two probes, while requests are made."""
LATE_TIMES: Final = 3.0
LATE_NS: Final = 5e7
"""A request that takes this multiple of the usual time, and this much more, causes a probe."""
_OFFSET: Final = 2e6
"""The additional time of requests is tracked from this size on: smaller differences are noise."""


class Belief:
    """The estimate of a link. Not thread-safe."""

    def __init__(self) -> None:
        self._probed_link: Link | None = None
        self._estimate: LinkEstimate | None = None
        self._more = Tracker(0.0, offset=_OFFSET)
        self._changed = False
        self._at_most = float("inf")  # bytes a second, by the slowest request since the last probe
        self._probed = -1e9

    @property
    def link(self) -> Link:
        """The current estimate."""
        if self._probed_link is not None:
            return self._probed_link
        return UNKNOWN if self._estimate is None else self._estimate.link

    @property
    def known(self) -> bool:
        """Whether there is any estimate."""
        return self._probed_link is not None or self._estimate is not None

    def take(self, link: Link | None, now: float) -> None:
        """Record a probe's result; None if it failed: then only answers show the link."""
        self._probed, self._changed, self._at_most = now, False, float("inf")
        if link is not None:
            self._probed_link = link
            self._more.reset(self._more.value, stale=True)
        elif not self.known:
            self._estimate = LinkEstimate(UNKNOWN, LARGEST)
            self._estimate.forget()

    def observe(self, bytes_up: float, bytes_down: float, ns: float) -> None:
        """Record a request's time on the network."""
        if self._probed_link is not None:
            expected = self._probed_link.network_ns(bytes_up, bytes_down)
            if ns > LATE_TIMES * (expected + self._more.value) + LATE_NS:
                self._changed, self._at_most = True, min(self._at_most, bytes_up / ns * 1e9)
            self._changed |= self._more.observe(max(0.0, ns - expected))
        elif self._estimate is not None:
            self._estimate.observe(bytes_up, bytes_down, max(1.0, ns))

    def wants_probe(self, now: float) -> bool:
        """Return whether a probe is due; never if none was answered."""
        if self._probed_link is None:
            return False
        return now - self._probed > (SOON if self._changed else AGAIN)

    def sizes(self) -> tuple[int, ...]:
        """Return the sizes of a probe's rounds: small if a late request suggests that the link is slow now."""
        goodput = self.link.up.bytes_per_second if self.known else float("inf")
        largest = int(max(LEAST, min(LARGEST, SHARE * goodput, max(4 * LEAST, SHARE * self._at_most))))
        return 0, largest // 2, largest


# `Watched`: a codec that reports its time for a tensor, and the encoded size.

Note = Callable[[int, int, int], None]
"""Called with (bytes of the tensor, bytes encoded, nanoseconds)."""


class Watched(Codec):
    """A codec that calls ``note`` with every tensor that it encodes; one that it does not support keeps its size."""

    def __init__(self, codec: Codec, note: Note) -> None:
        self._codec = codec
        self._note = note
        self.name = codec.name  # type: ignore[misc]
        self.lossless = codec.lossless  # type: ignore[misc]

    def encode(self, tensor: torch.Tensor, grain: Grain) -> Coded | None:
        started = time.perf_counter_ns()
        coded = self._codec.encode(tensor, grain)
        took = time.perf_counter_ns() - started
        nbytes = tensor.numel() * tensor.itemsize
        self._note(nbytes, nbytes if coded is None else min(nbytes, len(coded.data)), took)
        return coded

    def check(self, params: tuple[Param, ...], dtype: torch.dtype, elements: int, nbytes: int) -> None:
        self._codec.check(params, dtype, elements, nbytes)

    def decode(
        self, data: memoryview, params: tuple[Param, ...], dtype: torch.dtype, elements: int
    ) -> torch.Tensor | memoryview:
        return self._codec.decode(data, params, dtype, elements)


# The choice: for every tensor the codec with which it arrives decoded the soonest. Pure.
#
# of one tensor: encode + its bytes on the link + decode
#
# The link is a curve, not a rate: so tensors are priced at what a byte costs where all are sent raw, and again where
# all are as small as they can be. Of these two, and raw, the one that is fastest on the curve is taken.

RAW = "raw"


class Cost(NamedTuple):
    """The cost of one tensor with one codec: nanoseconds here, bytes, nanoseconds there."""

    encode_ns: float
    nbytes: float
    decode_ns: float


def pick(tensors: Sequence[Mapping[str, Cost]], up_ns: Callable[[float], float]) -> tuple[str, ...]:
    """Return the name of the codec for each tensor, possibly `RAW`. ``up_ns``: the time to send so many bytes.

    Among equal ones the first.
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
    """Return nanoseconds until all tensors have arrived and are decoded, one after the other."""
    costs = [known[name] for known, name in zip(tensors, way, strict=True)]
    return sum(one.encode_ns + one.decode_ns for one in costs) + up_ns(sum(one.nbytes for one in costs))


def _soonest(costs: Mapping[str, Cost], ns_per_byte: float) -> str:
    return min(costs, key=lambda name: costs[name].encode_ns + costs[name].decode_ns + costs[name].nbytes * ns_per_byte)


# `Speeds`: the times of codecs on this machine by kind of tensor, and the compression they reach at each cut.
#
# A *kind* is a dtype and a class of size (powers of four bytes): a codec's time per byte hardly depends on more. The
# encoded size depends on the values, and is kept for each *place*: a cut and the number of a piece there.

PLACES: Final = 4096
"""The number of remembered places; those used longest ago are measured again."""
SMALL_NS: Final = 20_000.0
"""Added to decoding times on both sides before they are compared, because short times are inaccurate."""
_TINY: Final = 1e-6
Key = TypeVar("Key")


class TensorKind(NamedTuple):
    """``size``: the power of four above the bytes."""

    dtype: str
    size: int

    @classmethod
    def of(cls, dtype: str, nbytes: int) -> TensorKind:
        return cls(dtype, math.ceil(math.log(max(1, nbytes), 4)))


Place = tuple[str, int]
"""(a cut's name, the number of a piece there)."""


class Speeds:
    """Speeds of codecs. Thread-safe. Decoding times are this machine's until a server has reported its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._encode: dict[tuple[str, TensorKind], Tracker] = {}
        self._decode: dict[tuple[str, TensorKind], Tracker] = {}
        self._ratio: OrderedDict[tuple[str, Place, TensorKind], Tracker] = OrderedDict()
        self._server = Tracker(1.0)

    @property
    def server_factor(self) -> float:
        """The server's decoding time relative to this machine's."""
        return self._server.value

    def knows(self, codec: str, place: Place, kind: TensorKind) -> bool:
        """Return whether `cost` has an answer."""
        return (codec, place, kind) in self._ratio

    def least_ns(self, codec: str, kind: TensorKind, nbytes: int) -> float:
        """Return a lower bound of the time for encoding and decoding; 0 if nothing of the kind was measured."""
        with self._lock:
            known = [speeds.get((codec, kind)) for speeds in (self._encode, self._decode)]
            return sum(nbytes * one.value for one in known if one is not None)

    def cost(self, codec: str, place: Place, kind: TensorKind, nbytes: int) -> Cost | None:
        """Return the cost of a tensor of ``nbytes`` there; None if it was never encoded."""
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

    def encoded(self, codec: str, place: Place, kind: TensorKind, nbytes: int, left: int, ns: float) -> None:
        """Record that a tensor of ``nbytes`` was encoded to ``left`` bytes in ``ns``."""
        with self._lock:
            _follow(self._encode, (codec, kind), ns / nbytes)
            _follow(self._ratio, (codec, place, kind), left / nbytes)
            if len(self._ratio) > PLACES:
                self._ratio.popitem(last=False)

    def decoded(self, codec: str, kind: TensorKind, nbytes: int, ns: float) -> None:
        """Record that it was decoded on this machine."""
        with self._lock:
            _follow(self._decode, (codec, kind), ns / nbytes)

    def observe(self, expected_ns: float, server_ns: float) -> None:
        """Record a server's decoding time, which `cost` predicted as ``expected_ns``."""
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


log = logging.getLogger(__name__)

GAIN: Final = 0.1
GAIN_NS: Final = 100_000.0
"""The advantage that another choice must have over the last one."""
MEASURING_SECONDS: Final = 0.5
"""The time limit for all codecs at one place; the remaining ones are not used there."""
Probe = Callable[[Sequence[int]], Link]


class Chooser:
    """Chooses codecs. Thread-safe.

    ``codecs``: those that may be used, by cut. ``probe``: measures the link for such sizes of a request; None: it is
    learned from answers.
    """

    def __init__(self, codecs: Codecs, probe: Probe | None = None) -> None:
        self.codecs = codecs
        self.speeds = Speeds()
        self._probe = probe
        self._lock = threading.Lock()
        self._belief = Belief()
        self._followed: Callable[[], Link] | None = None
        self._probing = threading.Lock()  # held by the probing thread
        self._held: dict[str, tuple[str, ...]] = {}  # by cut, the last choice
        self._warned: set[str] = set()

    @property
    def link(self) -> Link:
        """The current estimate."""
        if self._followed is not None:
            return self._followed()
        with self._lock:
            return self._belief.link

    def follow(self, link: Callable[[], Link]) -> None:
        """Use another estimate of the link from now on."""
        self._followed = link

    def begin(self) -> None:
        """Probe the link for the first time; without an answer (no server, not allowed) it is learned from answers."""
        if self._followed is None and not self._belief.known:
            with self._probing:
                if not self._belief.known:
                    self._take_probe()

    # A request

    def choose(self, early: EarlyOutput, offered: Collection[str], only: str | None = None) -> list[Codec]:
        """Return the codec for every piece. ``offered``: the server's codecs; ``only``: one chosen with the cut, of
        which only raw is an alternative.
        """
        self.begin()
        allowed = self.codecs.allowed(early.layer_name)
        if only is None:
            self._warn(early.layer_name)
        names = [name for name in allowed if is_offered(name, offered) and only in (None, name)]
        link = self.link
        costs = [self._costs(early, number, names, link) for number in range(len(early.pieces))]
        chosen = self._steady(early.layer_name, costs, self._best(costs, names, link), link)
        return [self._watched(early, number, name) for number, name in enumerate(chosen)]

    def _warn(self, cut: str) -> None:
        """Report once per cut that a calibration does not cover it, so that no lossy codec is used there."""
        table = self.codecs.table
        if table is not None and cut not in self._warned and all(one.name != cut for one in table.cuts):
            self._warned.add(cut)
            log.warning(
                "the calibration has no cut after %s, so no codec with a loss is used there (edge-client calibrate "
                "--cuts %s)",
                *(cut, cut),
            )

    def held(self, cut: str) -> tuple[str, ...] | None:
        """Return the names of the last choice for a cut, which the next one probably equals; None before the first."""
        return self._held.get(cut)

    def _best(self, costs: Sequence[dict[str, Cost]], names: Sequence[str], link: Link) -> tuple[str, ...]:
        """Return the best combination with at most one lossy codec, as calibrated."""
        lossless = {RAW, *(name for name in names if CODECS[name].lossless)}
        ways = []
        for lossy in (None, *(name for name in names if name not in lossless)):
            open_to = lossless if lossy is None else {*lossless, lossy}
            known = [{name: cost for name, cost in one.items() if name in open_to} for one in costs]
            ways.append(pick(known, link.up.ns))
        return min(ways, key=lambda way: total(costs, way, link.up.ns))

    def _steady(self, cut: str, costs: Sequence[dict[str, Cost]], best: tuple[str, ...], link: Link) -> tuple[str, ...]:
        """Return the last choice there, unless the best is clearly better, because measurements are noisy."""
        held = self._held.get(cut, tuple(RAW for _ in costs))
        if held != best and len(held) == len(costs) and all(name in one for name, one in zip(held, costs, strict=True)):
            before, now = (total(costs, way, link.up.ns) for way in (held, best))
            if now > (1 - GAIN) * before or before - now < GAIN_NS:
                return held
        self._held[cut] = best
        return best

    def _costs(self, early: EarlyOutput, number: int, names: Sequence[str], link: Link) -> dict[str, Cost]:
        piece = early.pieces[number]
        nbytes = piece.numel() * piece.itemsize
        if not nbytes:
            return {RAW: Cost(0.0, 0.0, 0.0)}
        place, kind = _place(early, number), _kind(piece)
        worth = link.up.ns(nbytes) - link.up.ns(0)
        until = time.monotonic() + MEASURING_SECONDS
        for name in names:
            if name == RAW or self.speeds.knows(name, place, kind):
                continue
            if self.speeds.least_ns(name, kind, nbytes) < worth and time.monotonic() < until:
                self._measure(early, number, name)
        return self._known(early, number, names)

    def _known(self, early: EarlyOutput, number: int, names: Sequence[str]) -> dict[str, Cost]:
        piece = early.pieces[number]
        nbytes, place, kind = piece.numel() * piece.itemsize, _place(early, number), _kind(piece)
        found = {RAW: Cost(0.0, float(nbytes), 0.0)}
        for name in names:
            if name != RAW and (cost := self.speeds.cost(name, place, kind, nbytes)) is not None:
                found[name] = cost
        return found

    def _measure(self, early: EarlyOutput, number: int, name: str) -> None:
        """Measure twice, ignoring the first time, in which a codec creates its tables and memory."""
        piece, place, kind = early.pieces[number], _place(early, number), _kind(early.pieces[number])
        nbytes = piece.numel() * piece.itemsize
        took: list[tuple[int, int, int]] = []
        watched = Watched(_codec(early, number, name), lambda *noted: took.append(noted))
        parcel = Parcel.of_tensors(None, [piece], watched, early.crossing.grains[number : number + 1])
        seen = self.speeds.least_ns(name, kind, nbytes)
        if not seen:
            parcel = Parcel.of_tensors(None, [piece], watched, early.crossing.grains[number : number + 1])
        self.speeds.encoded(name, place, kind, nbytes, took[-1][1], took[-1][2])
        payload = bytearray().join(parcel.buffers)
        for _ in range(1 if seen else 2):
            started = time.perf_counter_ns()
            Parcel.tensors(parcel.header, payload, bound=early.crossing.bound[number : number + 1])
            ns = time.perf_counter_ns() - started
        self.speeds.decoded(name, kind, nbytes, ns)

    def _watched(self, early: EarlyOutput, number: int, name: str) -> Codec:
        if name == RAW:
            return RAW_CODEC
        place, kind = _place(early, number), _kind(early.pieces[number])
        return Watched(_codec(early, number, name), partial(self._noted, name, place, kind))

    def _noted(self, name: str, place: Place, kind: TensorKind, nbytes: int, left: int, ns: int) -> None:
        self.speeds.encoded(name, place, kind, nbytes, left, ns)

    def decoding_ns(self, early: EarlyOutput, codecs: Sequence[str]) -> float:
        """Return the server's expected time to decode the pieces."""
        found = 0.0
        for number, name in enumerate(codecs[: len(early.pieces)]):
            cost = self._known(early, number, [name]).get(name)
            found += 0.0 if cost is None else cost.decode_ns
        return found

    # Outcomes

    def answered(self, bytes_up: int, bytes_down: int, network_ns: int, decoding: tuple[float, int]) -> None:
        """Record a request that was sent once: its bytes, with those before it; the round trip without the server's own
        time; the expected and actual time of decoding there.
        """
        expected, took = decoding
        if expected:
            self.speeds.observe(expected, took)
        if self._followed is not None:
            return
        with self._lock:
            self._belief.observe(bytes_up, bytes_down, network_ns)
            wanted = self._belief.wants_probe(time.monotonic())
        if wanted and self._probing.acquire(blocking=False):
            threading.Thread(target=self._probe_again, name="isthmus-codec-probe", daemon=True).start()

    def _probe_again(self) -> None:
        try:
            self._take_probe()
        finally:
            self._probing.release()

    def _take_probe(self) -> None:
        with self._lock:
            sizes = self._belief.sizes()
        link = None
        if self._probe is not None:
            with suppress(Exception):  # the requests themselves report what is wrong with the server
                link = self._probe(sizes)
        with self._lock:
            self._belief.take(link, time.monotonic())


def _codec(early: EarlyOutput, number: int, name: str) -> Codec:
    """Return the codec, with what it needs to know of the piece."""
    bound = early.crossing.bound
    own = bound[number].get(name) if number < len(bound) else None
    return own or CODECS[name].at(early.layer_name, number)


def _place(early: EarlyOutput, number: int) -> Place:
    return early.layer_name, number


def _kind(piece: torch.Tensor) -> TensorKind:
    return TensorKind.of(dtype_name(piece.dtype), piece.numel() * piece.itemsize)
