"""From two profiles, the link and the load: what every candidate takes.

    latency    = prepare + edge + encode + network(bytes up, bytes down) + queue + tail + finish
    energy     = the edge's own, and idle power times the waiting for the rest
    throughput = 1 / the slowest of: the edge's work, each direction of the link, the tail over the workers

The middles of profiles are added (`Quartiles`); what is not in them (a transport's fixed overhead) is `Correction`'s.
Quartiles are not: on one machine times rise and fall together, so how far they lie from their middles is added; edge,
link and server do so independently of each other, and are added as squares.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from edge_client.load import Load
from edge_client.planning.codecs import Codecs
from edge_client.planning.link import Link
from edge_client.planning.objective import Candidate
from edge_client.spoken import CLOUD_FILE, CLOUD_ONLY, EDGE_ONLY
from shared_hooks.errors import SpecError
from shared_hooks.metrics import Reading
from shared_hooks.profiling.profile import INPUT_CUT, CodecProfile, CutProfile, FileInput, Profile, Quartiles

# What every networked request takes beyond the prediction: fitted from a few real ones, kept with their numbers.


@dataclass(frozen=True, slots=True)
class Sample:
    """One real request: its candidate's name, what was predicted of it without correction, and what it took (ns)."""

    name: str
    predicted_ns: float
    measured_ns: float


@dataclass(frozen=True, slots=True)
class Correction:
    """``overhead_ns``: the median of measured less predicted, added to the network stage of every networked candidate.

    It may be negative: then requests were faster than predicted.
    """

    overhead_ns: float
    samples: tuple[Sample, ...]

    @classmethod
    def fit(cls, samples: Sequence[Sample]) -> Correction:
        """Raises ValueError for no samples."""
        if not samples:
            raise ValueError("no requests to correct by")
        return cls(statistics.median(one.measured_ns - one.predicted_ns for one in samples), tuple(samples))

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "overhead_ns": self.overhead_ns,
            "samples": [
                {"name": one.name, "predicted_ns": one.predicted_ns, "measured_ns": one.measured_ns}
                for one in self.samples
            ],
        }


LEAST_MEASURED = 3
"""Repetitions below which nothing is said of a spread."""


@dataclass(frozen=True)
class Power:
    """Watts of this machine as the user gives them: while it computes, and while it waits."""

    active: float
    idle: float

    def __post_init__(self) -> None:
        if not 0 <= self.idle <= self.active < float("inf"):
            raise SpecError(f"power: active {self.active} W, idle {self.idle} W: expected 0 <= idle <= active")


def watts_of(power: tuple[float, float] | None) -> Power | None:
    """This machine's at work and idle; None where they are not given. Raises SpecError for what is none."""
    if power is None:
        return None
    if not isinstance(power, (tuple, list)) or len(power) != 2:
        raise SpecError(f"power: expected watts of this machine at work and idle, such as (6, 2), found {power!r}")
    return Power(*power)


def predict(
    edge: Profile,
    cloud: Profile | None,
    link: Link | None,
    load: Load | None = None,
    *,
    file: FileInput | None = None,
    file_crosses: bool = True,
    correction: Correction | None = None,
    power: Power | None = None,
    edge_factor: float = 1.0,
    server_factor: float = 1.0,
    only: Collection[str] | None = None,
    codecs: Codecs | None = None,
    keys: Collection[str] | None = None,
    bytes_up: Mapping[str, float] | None = None,
    spreads: bool = True,
) -> list[Candidate]:
    """edge-only, cloud-only, cloud-only-file, and every cut that both profiles know, in the order of the layers.

    With ``codecs`` each cut is a candidate for each codec that may be used there and that both profiles measured.
    ``bytes_up``: what requests of a candidate (by its key) were seen to take, in place of the profile's.

    ``file`` is the input file whose preparation here counts; it also crosses as it is unless ``file_crosses`` is False
    (a server that cannot read files). Without ``cloud`` or ``link`` there is edge-only alone. The factors multiply the
    times of either side; ``only`` restricts the names, ``keys`` the keys. Without ``spreads``: no quartiles.

    Raises SpecError for profiles of different models.
    """
    if edge.side != "edge" or (cloud is not None and cloud.side != "cloud"):
        raise SpecError("a plan takes an edge's profile and a cloud's, in that order")
    here = _Edge(edge, file, edge_factor, power, spreads)
    found = [here.alone()] if only is None or EDGE_ONLY in only else []
    if cloud is None or link is None:
        return found
    check_same_model(edge, cloud)
    there = _Cloud(cloud, link, load or Load(), correction, server_factor)
    tails = {cut.name: cut for cut in cloud.cuts}
    if file is not None and file_crosses and (only is None or CLOUD_FILE in only):
        found.append(_file(here, there, file, tails.get("input")))
    for cut in edge.cuts:
        name = CLOUD_ONLY if cut.layer_id == INPUT_CUT else cut.name
        if cut.name not in tails or (only is not None and name not in only):
            continue
        for codec, agreement in [("", None)] if codecs is None else codecs.at(cut.name):
            if keys is not None and (f"{name} + {codec}" if codec else name) not in keys:
                continue
            coded = _coded(here.profile, there.profile, cut, tails[cut.name], codec)
            if coded is not None:
                found.append(_cut(here, there, name, cut, tails[cut.name], coded, agreement))
    if bytes_up:
        return [one if one.key not in bytes_up else there.resized(one, bytes_up[one.key]) for one in found]
    return found


class _Coded(NamedTuple):
    """A cut's frontier with one codec, as both sides measured it."""

    codec: str
    encode: Quartiles
    decode: Quartiles
    wire_bytes: int


def _coded(edge: Profile, cloud: Profile, head: CutProfile, tail: CutProfile, codec: str) -> _Coded | None:
    """``codec`` empty: the one of the edge's profile. None where a side did not measure it."""
    mine, theirs = edge.settings.get("codec", "raw"), cloud.settings.get("codec", "raw")
    name = codec or mine
    known, away = head.codecs.get(name), tail.codecs.get(name)
    if name == mine:
        known = CodecProfile(head.wire_bytes, head.stages["encode"])
    if name == theirs or (away is None and not codec):  # of a server that measured no other
        away = CodecProfile(tail.wire_bytes, tail.stages.get("decode", Quartiles(0.0, 0.0, 0.0, 0)))
    if known is None or away is None:
        return None
    return _Coded(codec, known.ns, away.ns, known.wire_bytes)


def check_same_model(edge: Profile, cloud: Profile) -> None:
    """SpecError naming what differs."""
    for field, what in (
        ("weights_hash", "weights"),
        ("structure_digest", "layers"),
        ("plan_digest", "plans"),
        ("depth", "depths"),
    ):
        mine, theirs = getattr(edge.model, field), getattr(cloud.model, field)
        if mine != theirs:
            raise SpecError(
                f"the two profiles differ in their {what}: {edge.model.model_id} has {_short(mine)} on the edge, "
                f"{cloud.model.model_id} has {_short(theirs)} on the cloud"
            )


@dataclass(frozen=True)
class _Edge:
    profile: Profile
    file: FileInput | None
    factor: float
    power: Power | None
    spreads: bool

    @property
    def finish_ns(self) -> float:
        known = self.profile.finish_ns
        return known.middle * self.factor if known else 0.0

    @property
    def prepare_ns(self) -> float:
        return self.file.prepare_ns.middle * self.factor if self.file else 0.0

    def alone(self) -> Candidate:
        whole = self.profile.alone_ns.middle * self.factor
        stages = {"prepare": self.prepare_ns, "edge": whole}
        spread = self.spread([self.profile.alone_ns], finishes=False)
        work = self.prepare_ns + whole
        return Candidate(
            EDGE_ONLY,
            None,
            stages,
            bytes_up=0,
            bytes_down=0,
            edge_energy=self.energy(self.profile.whole_energy, work, 0.0),
            edge_memory=self.memory(self.profile.whole_memory_peak),
            throughput=_rate(work),
            quartiles_ns=_quartiles(stages, spread),
        )

    def spread(self, own: Sequence[Quartiles], *, prepares: bool = True, finishes: bool = True) -> _Spread | None:
        """The spread of ``own`` and what a request does around it; None where it is not wanted."""
        if not self.spreads:
            return None
        around = [
            *([self.file.prepare_ns] if self.file and prepares else []),
            *([self.profile.finish_ns] if self.profile.finish_ns and finishes else []),
        ]
        return _spread(self.profile, [*own, *around], self.factor)

    def energy(self, own: Reading, work_ns: float, waiting_ns: float) -> Reading:
        """Joules of ``work_ns`` of computing, whose head took ``own``, and of waiting for the rest."""
        if self.power is not None:
            joules = (self.power.active * work_ns + self.power.idle * waiting_ns) / 1e9
            return Reading.estimated(
                joules, f"given: {self.power.active:g} W while it computes, {self.power.idle:g} W while it waits"
            )
        idle = self.profile.idle_power
        if own.value is None:
            return own
        joules, source = own.value, [own.note or own.status]
        if self.prepare_ns:
            whole = self.profile.whole_energy
            if whole.value is None:
                return Reading.unavailable(f"preparing the input: {whole.note}")
            joules += whole.value / max(1.0, self.profile.alone_ns.middle) * self.prepare_ns
            source.append("preparation at the whole model's mean power")
        if waiting_ns:
            if idle.value is None:
                return Reading.unavailable(f"idle power: {idle.note}")
            joules += idle.value * waiting_ns / 1e9
            source.append(f"waiting at {idle.value:.3g} W idle")
        return own if len(source) == 1 else Reading.estimated(joules, "; ".join(source))

    def memory(self, peak: Reading) -> Reading:
        """The peak beyond the weights, and the weights."""
        return peak if peak.value is None else replace(peak, value=peak.value + self.profile.weights_bytes)


@dataclass(frozen=True)
class _Cloud:
    profile: Profile
    link: Link
    load: Load
    correction: Correction | None
    factor: float

    def network_ns(self, bytes_up: float) -> float:
        overhead = self.correction.overhead_ns if self.correction else 0.0
        return max(0.0, self.link.network_ns(bytes_up, self.profile.answer_bytes) + overhead)

    def resized(self, one: Candidate, bytes_up: float) -> Candidate:
        """With other bytes on the way up."""
        stages = {**one.stages_ns, "network": self.network_ns(bytes_up)}
        off = stages["network"] - one.stages_ns["network"]
        quartiles = one.quartiles_ns and (one.quartiles_ns[0] + off, one.quartiles_ns[1] + off)
        return replace(one, stages_ns=stages, bytes_up=round(bytes_up), quartiles_ns=quartiles)

    def network_spread(self, bytes_up: float) -> _Spread:
        """A link that was given has none."""
        if self.link.quarters is None:
            return _Spread(0.0, 0.0)
        low, high = self.link.quarters
        middle = self.link.up.ns(bytes_up)
        return _Spread(max(0.0, middle - low.ns(bytes_up)), max(0.0, high.ns(bytes_up) - middle))

    def rate(self, work_ns: float, bytes_up: float, tail_ns: float) -> float | None:
        """Round trips overlap when several are under way; what they occupy does not."""
        up, down = self.link.up, self.link.down
        return _rate(
            max(
                work_ns,
                up.ns(bytes_up) - up.ns(0),
                down.ns(self.profile.answer_bytes) - down.ns(0),
                tail_ns / max(1, self.load.workers),
            )
        )


def _cut(
    here: _Edge,
    there: _Cloud,
    name: str,
    head: CutProfile,
    tail: CutProfile,
    coded: _Coded,
    agreement: float | None,
) -> Candidate:
    edge_ns = head.stages["head"].middle * here.factor
    encode_ns = coded.encode.middle * here.factor
    ends = {**tail.stages, **({"decode": coded.decode} if "decode" in tail.stages else {})}
    tail_ns = sum(stage.middle for stage in ends.values()) * there.factor
    network_ns = there.network_ns(coded.wire_bytes)
    work = here.prepare_ns + edge_ns + encode_ns
    notes = [f"{side}: {cut.estimated}" for side, cut in (("edge", head), ("cloud", tail)) if cut.estimated]
    stages = {
        "prepare": here.prepare_ns,
        "edge": edge_ns,
        "encode": encode_ns,
        "network": network_ns,
        "queue": there.load.queue_ns,
        "tail": tail_ns,
        "finish": here.finish_ns,
    }
    own = here.spread([head.stages["head"], coded.encode])
    others = (
        (there.network_spread(coded.wire_bytes), _spread(there.profile, list(ends.values()), there.factor))
        if own is not None
        else ()
    )
    return Candidate(
        name,
        head.layer_id,
        stages,
        codec=coded.codec,
        bytes_up=coded.wire_bytes,
        bytes_down=there.profile.answer_bytes,
        edge_energy=here.energy(head.energy, work, network_ns + there.load.queue_ns + tail_ns),
        edge_memory=here.memory(head.memory_peak),
        throughput=there.rate(work, coded.wire_bytes, tail_ns),
        accuracy=_agreement(here.profile, there.profile) if agreement in (None, 1.0) else agreement,
        notes=tuple(notes),
        quartiles_ns=_quartiles(stages, own, *others),
        last=head.layer_id == here.profile.layers[-1].layer_id,
    )


def _file(here: _Edge, there: _Cloud, file: FileInput, tail: CutProfile | None) -> Candidate:
    known = next((one for one in there.profile.files if one.suffix == file.suffix), None)
    reading_ns, guess = (known.prepare_ns.middle, "") if known else _reading(here.profile, there.profile, file)
    encode_ns = tail.stages["encode"].middle if tail is not None and "encode" in tail.stages else 0.0
    tail_ns = (there.profile.alone_ns.middle + reading_ns + encode_ns) * there.factor
    network_ns = there.network_ns(file.nbytes)
    energy = here.power.idle if here.power else here.profile.idle_power.value
    waiting = network_ns + there.load.queue_ns + tail_ns
    source = "given" if here.power else here.profile.idle_power.note
    stages = {"network": network_ns, "queue": there.load.queue_ns, "tail": tail_ns, "finish": here.finish_ns}
    spreads = (
        here.spread([], prepares=False),
        there.network_spread(file.nbytes),
        _spread(there.profile, [there.profile.alone_ns, known.prepare_ns if known else file.prepare_ns], there.factor),
    )
    return Candidate(
        CLOUD_FILE,
        INPUT_CUT,
        stages,
        bytes_up=file.nbytes,
        bytes_down=there.profile.answer_bytes,
        edge_energy=Reading.unavailable(f"idle power: {source}")
        if energy is None
        else Reading.estimated(energy * waiting / 1e9, f"waiting at {energy:.3g} W idle ({source})"),
        edge_memory=Reading.estimated(
            float(file.nbytes + here.profile.weights_bytes), "the file and the weights, which stay loaded"
        ),
        throughput=there.rate(0.0, file.nbytes, tail_ns),
        accuracy=_agreement(here.profile, there.profile),
        notes=(f"the server's reading of the file is estimated: {guess}",) if guess else (),
        quartiles_ns=_quartiles(stages, *spreads),
    )


@dataclass(frozen=True)
class _Spread:
    """How far the first quartile lies below the middle, and the third above it, in ns."""

    below: float
    above: float


def _spread(profile: Profile, times: Sequence[Quartiles], factor: float) -> _Spread | None:
    """The spread of what one side does in turn; None where too little was measured (``n`` 0: estimated from measured
    ones).
    """
    if profile.alone_ns.n < LEAST_MEASURED or any(0 < one.n < LEAST_MEASURED for one in times):
        return None
    below, above = (one.middle - one.q1 for one in times), (one.q3 - one.middle for one in times)
    return _Spread(factor * sum(max(0.0, ns) for ns in below), factor * sum(max(0.0, ns) for ns in above))


def _quartiles(stages: Mapping[str, float], *spreads: _Spread | None) -> tuple[float, float] | None:
    """Around the sum of ``stages``, of what is independent of each other; None where one of them is not known."""
    known = [one for one in spreads if one is not None]
    if len(known) < len(spreads):
        return None
    latency = sum(stages.values())
    below, above = math.hypot(*(one.below for one in known)), math.hypot(*(one.above for one in known))
    return latency - below, latency + above


def _reading(edge: Profile, cloud: Profile, file: FileInput) -> tuple[float, str]:
    """Nanoseconds the server takes to read a file, and what that is guessed from: processors do it on either side."""
    here = file.prepare_ns.middle
    if all(str(one.machine.get("device")) == "cpu" for one in (edge, cloud)):
        ratio = cloud.alone_ns.middle / max(1.0, edge.alone_ns.middle)
        return here * ratio, f"as it takes here, times {ratio:.2f}, by which the model takes longer there"
    return here, "as long as it takes here"


def _agreement(edge: Profile, cloud: Profile) -> float | None:
    """Cuts are exact between devices of one kind; between kinds they are as good, and nobody has counted."""
    kinds = {str(one.machine.get("device")).partition(":")[0] for one in (edge, cloud)}
    return 1.0 if len(kinds) == 1 else None


def _rate(ns: float) -> float | None:
    return 1e9 / ns if ns > 0 else None


def _short(value: object) -> str:
    return str(value)[:12] if value not in (None, "") else "none"
