"""`Chooser`: of one client, the codec of every tensor; it measures what it does not know, and learns from answers.

At a place (a cut, and a piece of it) that it sees for the first time it encodes and decodes the piece once with every
codec that may be used there, unless that alone would take longer than sending it raw. That request pays for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import torch

from edge_client.choosing.belief import Belief
from edge_client.choosing.pick import RAW, Cost, pick, total
from edge_client.choosing.speeds import Kind, Place, Speeds
from edge_client.choosing.watched import Watched
from edge_client.planning.codecs import Codecs
from edge_client.planning.link import Link
from shared_hooks.codecs import CODECS, Codec
from shared_hooks.codecs import RAW as RAW_CODEC
from shared_hooks.crossing import EarlyOutput, Parcel
from shared_hooks.tensors import dtype_name

log = logging.getLogger(__name__)

GAIN: Final = 0.1
GAIN_NS: Final = 100_000.0
"""By which another choice must be better than the last one."""
MEASURING_SECONDS: Final = 0.5
"""For all codecs at one place, at most; the others are not used there."""
Probe = Callable[[Sequence[int]], Link]


class Chooser:
    """``codecs``: those that may be used, by cut. ``probe``: the link, for such sizes of a request; None: it is learnt
    from answers alone. Any thread may call.
    """

    def __init__(self, codecs: Codecs, probe: Probe | None = None) -> None:
        self.codecs = codecs
        self.speeds = Speeds()
        self._probe = probe
        self._lock = threading.Lock()
        self._belief = Belief()
        self._followed: Callable[[], Link] | None = None
        self._probing = threading.Lock()  # held by who probes
        self._held: dict[str, tuple[str, ...]] = {}  # by cut, the last choice
        self._told: set[str] = set()

    @property
    def link(self) -> Link:
        """As it is believed to be now."""
        if self._followed is not None:
            return self._followed()
        with self._lock:
            return self._belief.link

    def follow(self, link: Callable[[], Link]) -> None:
        """From now on somebody else knows the link."""
        self._followed = link

    def begin(self) -> None:
        """Probe the link for the first time; without an answer (no server, not allowed) answers will tell."""
        if self._followed is None and not self._belief.known:
            with self._probing:
                if not self._belief.known:
                    self._take_probe()

    # A request

    def choose(self, early: EarlyOutput, offered: Collection[str], only: str | None = None) -> list[Codec]:
        """Of every piece the codec to pack it with. ``offered``: codecs of the server; ``only``: one that was chosen
        with the cut, against which raw alone is weighed.
        """
        self.begin()
        allowed = self.codecs.allowed(early.layer_name)
        if only is None:
            self._tell(early.layer_name)
        names = [name for name in allowed if name in offered and only in (None, name)]
        link = self.link
        costs = [self._costs(early, number, names, link) for number in range(len(early.pieces))]
        chosen = self._steady(early.layer_name, costs, self._best(costs, names, link), link)
        return [self._watched(early, number, name) for number, name in enumerate(chosen)]

    def _tell(self, cut: str) -> None:
        """Once a cut: that a calibration says nothing of it, so that nothing is lost there."""
        table = self.codecs.table
        if table is not None and cut not in self._told and all(one.name != cut for one in table.cuts):
            self._told.add(cut)
            log.warning(
                "the calibration has no cut after %s, so no codec with a loss is used there (edge-client calibrate "
                "--cuts %s)",
                *(cut, cut),
            )

    def held(self, cut: str) -> tuple[str, ...] | None:
        """The names of the last choice for a cut, which the next one is likely to be; None before the first."""
        return self._held.get(cut)

    def _best(self, costs: Sequence[dict[str, Cost]], names: Sequence[str], link: Link) -> tuple[str, ...]:
        """Among the ways with one lossy codec at most: that is what was calibrated."""
        lossless = {RAW, *(name for name in names if CODECS[name].lossless)}
        ways = []
        for lossy in (None, *(name for name in names if name not in lossless)):
            open_to = lossless if lossy is None else {*lossless, lossy}
            known = [{name: cost for name, cost in one.items() if name in open_to} for one in costs]
            ways.append(pick(known, link.up.ns))
        return min(ways, key=lambda way: total(costs, way, link.up.ns))

    def _steady(self, cut: str, costs: Sequence[dict[str, Cost]], best: tuple[str, ...], link: Link) -> tuple[str, ...]:
        """The last choice there, unless the best is clearly better: what is measured is noisy."""
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
        """Twice, and the first does not count: a codec's own tables and memory are made then."""
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

    def _noted(self, name: str, place: Place, kind: Kind, nbytes: int, left: int, ns: int) -> None:
        self.speeds.encoded(name, place, kind, nbytes, left, ns)

    def decoding_ns(self, early: EarlyOutput, codecs: Sequence[str]) -> float:
        """What the server is expected to take to decode the pieces."""
        found = 0.0
        for number, name in enumerate(codecs[: len(early.pieces)]):
            cost = self._known(early, number, [name]).get(name)
            found += 0.0 if cost is None else cost.decode_ns
        return found

    # What became of it

    def answered(self, bytes_up: int, bytes_down: int, network_ns: int, decoding: tuple[float, int]) -> None:
        """One that was sent once: its bytes, with those before it; the round trip without the server's own time; what
        decoding was expected to take there, and took.
        """
        expected, took = decoding
        if expected:
            self.speeds.told(expected, took)
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
            with suppress(Exception):  # the requests themselves say what is wrong with the server
                link = self._probe(sizes)
        with self._lock:
            self._belief.take(link, time.monotonic())


def _codec(early: EarlyOutput, number: int, name: str) -> Codec:
    """With what it needs to know of the piece, if it needs anything."""
    bound = early.crossing.bound
    return bound[number].get(name, CODECS[name]) if number < len(bound) else CODECS[name]


def _place(early: EarlyOutput, number: int) -> Place:
    return early.layer_name, number


def _kind(piece: torch.Tensor) -> Kind:
    return Kind.of(dtype_name(piece.dtype), piece.numel() * piece.itemsize)
