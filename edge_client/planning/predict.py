"""Predict every candidate's latency, energy and throughput from two profiles, the link and the load.

    latency    = prepare + edge + encode + network(bytes up, bytes down) + queue + tail + finish
    energy     = the edge's own, and idle power times the waiting for the rest
    throughput = 1 / the slowest of: the edge's work, each direction of the link, the tail over the workers

The middles of profiles are added (`Quartiles`). What they omit, and the error of such sums on this device, link and
server, comes from a few real requests (`Correction`).
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from edge_client.call import Load
from edge_client.planning.codecs import Codecs
from edge_client.planning.link import Link
from edge_client.planning.objective import Candidate
from edge_client.user_text import CLOUD_FILE, CLOUD_ONLY, EDGE_ONLY
from shared_hooks.errors import SpecError
from shared_hooks.metrics import Reading
from shared_hooks.profiling.profile import INPUT_CUT, CodecProfile, CutProfile, FileInput, Profile, Quartiles

# The overhead of requests over the prediction, and its uncertainty: from a few real ones, kept with their numbers.


CUTS_MEASURED: Final = 9
BATCHES: Final = 2
"""A plan makes real requests at `CUTS_MEASURED` cuts, in `BATCHES`: before and after all other measurements, to detect
a machine that drifts.
"""


@dataclass(frozen=True, slots=True)
class RequestSample:
    """Real requests of a candidate, in one batch: the prediction without correction, and the measured median, in
    nanoseconds.
    """

    name: str
    predicted_ns: float
    measured_ns: float

    @property
    def missing_ns(self) -> float:
        """Measured minus predicted."""
        return self.measured_ns - self.predicted_ns


@dataclass(frozen=True, slots=True)
class Correction:
    """A correction of predictions. ``overhead_ns``: the median of what predictions of cuts lacked, added to the network
    stage of every networked candidate; ``alone_ns``: what edge-only lacked, added to it. Either may be negative.
    """

    samples: tuple[RequestSample, ...]
    """One for each cut that was measured."""
    overhead_ns: float
    alone_ns: float = 0.0

    @classmethod
    def fit(cls, samples: Sequence[RequestSample], alone: Sequence[RequestSample] = ()) -> Correction:
        """Fit a correction. Raises ValueError for no samples."""
        if not samples:
            raise ValueError("no requests to correct by")
        overhead = statistics.median(one.missing_ns for one in samples)
        return cls(tuple(samples), overhead, statistics.median(one.missing_ns for one in alone) if alone else 0.0)

    @property
    def error_ns(self) -> float | None:
        """The distance within which, nine times of ten, the median of real requests of any candidate lies from its
        corrected prediction: the second largest distance of the samples. None with too few of them.

        Of 19 numbers in random order, the last is within the second largest of the 18 before it 17 times (split
        conformal prediction, Vovk et al. 2005).
        """
        if len(self.samples) < BATCHES * CUTS_MEASURED:
            return None
        return sorted(abs(one.missing_ns - self.overhead_ns) for one in self.samples)[-2]

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        return {
            "overhead_ns": self.overhead_ns,
            "alone_ns": self.alone_ns,
            "error_ns": self.error_ns,
            "samples": [
                {"name": one.name, "predicted_ns": one.predicted_ns, "measured_ns": one.measured_ns}
                for one in self.samples
            ],
        }


def cuts_to_measure(names: Sequence[str]) -> list[str]:
    """Return `CUTS_MEASURED` of the cuts ``names``, in the order of layers, evenly spread; all if there are fewer."""
    count = min(CUTS_MEASURED, len(names))
    return [names[int((number + 0.5) * len(names) / count)] for number in range(count)]


UNSTEADY: Final = 2.5
"""Ratio of the third quartile of a side's time to the first, from which, if that is also a quarter of the latency, a
candidate cannot be ranked.
"""


@dataclass(frozen=True)
class GivenPower:
    """Watts of this machine as given by the user: active, and idle."""

    active: float
    idle: float

    def __post_init__(self) -> None:
        if not 0 <= self.idle <= self.active < float("inf"):
            raise SpecError(f"power: active {self.active} W, idle {self.idle} W: expected 0 <= idle <= active")


def watts_of(power: tuple[float, float] | None) -> GivenPower | None:
    """Return this machine's watts; None if not given. Raises SpecError for invalid ones."""
    if power is None:
        return None
    if not isinstance(power, (tuple, list)) or len(power) != 2:
        raise SpecError(f"power: expected watts of this machine at work and idle, such as (6, 2), found {power!r}")
    return GivenPower(*power)


def predict(
    edge: Profile,
    cloud: Profile | None,
    link: Link | None,
    load: Load | None = None,
    *,
    file: FileInput | None = None,
    file_crosses: bool = True,
    correction: Correction | None = None,
    power: GivenPower | None = None,
    edge_factor: float = 1.0,
    server_factor: float = 1.0,
    only: Collection[str] | None = None,
    codecs: Codecs | None = None,
    keys: Collection[str] | None = None,
    bytes_up: Mapping[str, float] | None = None,
) -> list[Candidate]:
    """Predict edge-only, cloud-only, cloud-only-file, and every cut that both profiles have, in the order of the
    layers.

    With ``codecs`` each cut is a candidate for each allowed codec that both profiles measured. ``bytes_up``: by a
    candidate's key, the size of real requests, in place of the profile's.

    ``file`` is the input file whose preparation here counts; it also crosses as it is unless ``file_crosses`` is False
    (a server that cannot read files). Without ``cloud`` or ``link`` there is edge-only alone. The factors multiply the
    times of either side; ``only`` restricts the names, ``keys`` the keys.

    Raises SpecError for profiles of different models.
    """
    if edge.side != "edge" or (cloud is not None and cloud.side != "cloud"):
        raise SpecError("a plan takes an edge's profile and a cloud's, in that order")
    here = _Edge(edge, file, edge_factor, power, correction)
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
    """Return the frontier with ``codec`` (empty: the edge profile's). None if a side did not measure it."""
    mine, theirs = edge.settings.get("codec", "raw"), cloud.settings.get("codec", "raw")
    name = codec or mine
    known, away = head.codecs.get(name), tail.codecs.get(name)
    if name == mine:
        known = CodecProfile(head.wire_bytes, head.stages["encode"])
    if name == theirs or (away is None and not codec):  # for a server that measured no other
        away = CodecProfile(tail.wire_bytes, tail.stages.get("decode", Quartiles(0.0, 0.0, 0.0, 0)))
    if known is None or away is None:
        return None
    return _Coded(codec, known.ns, away.ns, known.wire_bytes)


def check_same_model(edge: Profile, cloud: Profile) -> None:
    """Raise SpecError naming what differs."""
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
    power: GivenPower | None
    correction: Correction | None

    @property
    def finish_ns(self) -> float:
        known = self.profile.finish_ns
        return known.middle * self.factor if known else 0.0

    @property
    def prepare_ns(self) -> float:
        return self.file.prepare_ns.middle * self.factor if self.file else 0.0

    def alone(self) -> Candidate:
        missing = self.correction.alone_ns if self.correction else 0.0
        whole = max(0.0, self.profile.alone_ns.middle * self.factor + missing)
        stages = {"prepare": self.prepare_ns, "edge": whole}
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
            interval_ns=_interval(stages, self.correction),
            **_unsteady(stages, edge=(self.profile.alone_ns, self.factor)),
        )

    def energy(self, own: Reading, work_ns: float, waiting_ns: float) -> Reading:
        """Return joules of ``work_ns`` of computing, of which the head took ``own``, and of waiting for the rest."""
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
        """Return the peak including the weights."""
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
        """Return the candidate with another size on the way up."""
        stages = {**one.stages_ns, "network": self.network_ns(bytes_up)}
        off = stages["network"] - one.stages_ns["network"]
        interval = one.interval_ns and (one.interval_ns[0] + off, one.interval_ns[1] + off)
        return replace(one, stages_ns=stages, bytes_up=round(bytes_up), interval_ns=interval)

    def rate(self, work_ns: float, bytes_up: float, tail_ns: float) -> float | None:
        """Return the throughput. Concurrent round trips overlap; what occupies a resource does not."""
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
        interval_ns=_interval(stages, there.correction),
        last=head.layer_id == here.profile.layers[-1].layer_id,
        **_unsteady(stages, edge=(head.stages["head"], here.factor), server=(tail.stages["compute"], there.factor)),
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
        interval_ns=None if guess else _interval(stages, there.correction),
    )


def _interval(stages: Mapping[str, float], correction: Correction | None) -> tuple[float, float] | None:
    """Return the interval around the sum of ``stages``; None with too few real requests."""
    error = None if correction is None else correction.error_ns
    latency = sum(stages.values())
    return None if error is None else (max(0.0, latency - error), latency + error)


def _unsteady(stages: Mapping[str, float], **sides: tuple[Quartiles, float]) -> dict[str, Any]:
    """Return `Candidate.unsteady` and `Candidate.slow_ns`, if a side's time varies too much; else nothing."""
    latency = sum(stages.values())
    for side, (one, factor) in sides.items():
        if one.q3 > UNSTEADY * one.q1 and (one.q3 - one.q1) * factor > latency / 4:
            low, high = factor * one.q1 / 1e6, factor * one.q3 / 1e6
            reason = f"measured too unsteadily to rank: {low:.1f} to {high:.1f} ms on the {side}"
            slow_ns = sum(factor * (one.q3 - one.middle) for one, factor in sides.values())
            return {"unsteady": reason, "slow_ns": latency + slow_ns}
    return {}


def _reading(edge: Profile, cloud: Profile, file: FileInput) -> tuple[float, str]:
    """Return nanoseconds of the server to read a file, and the source of the estimate: processors do it on
    either side.
    """
    here = file.prepare_ns.middle
    if all(str(one.machine.get("device")) == "cpu" for one in (edge, cloud)):
        ratio = cloud.alone_ns.middle / max(1.0, edge.alone_ns.middle)
        return here * ratio, f"as it takes here, times {ratio:.2f}, by which the model takes longer there"
    return here, "as long as it takes here"


def _agreement(edge: Profile, cloud: Profile) -> float | None:
    """Return 1 between devices of one kind, where cuts are exact; None between kinds, where agreement was not
    measured.
    """
    kinds = {str(one.machine.get("device")).partition(":")[0] for one in (edge, cloud)}
    return 1.0 if len(kinds) == 1 else None


def _rate(ns: float) -> float | None:
    return 1e9 / ns if ns > 0 else None


def _short(value: object) -> str:
    return str(value)[:12] if value not in (None, "") else "none"
