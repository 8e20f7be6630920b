"""Measure one side of a model: its layers in whole forwards, and its part of every cut.

Repetitions run in rounds, every cut once and then all again, so that a machine that slows down or speeds up affects all
of them alike. What does not fit into the budget is estimated (`estimate`) and marked as such.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean
from typing import Any

from shared_hooks import codecs, devices
from shared_hooks.codecs.basis import Basis, Book
from shared_hooks.crossing import Parcel
from shared_hooks.errors import CutRefused, IsthmusError, SpecError
from shared_hooks.metrics import Reading
from shared_hooks.metrics.sampler import throttling
from shared_hooks.planning import Plan
from shared_hooks.profiling import machine
from shared_hooks.profiling.machine import warnings_of_threads
from shared_hooks.profiling.profile import (
    INPUT_CUT,
    CodecProfile,
    CutProfile,
    FileInput,
    LayerProfile,
    ModelIdentity,
    Profile,
    Quartiles,
    Side,
    middle_half,
)
from shared_hooks.profiling.timers import (
    NOTE,
    Around,
    HeadTimer,
    Inputs,
    Inspection,
    PowerMeters,
    TailTimer,
    TimedCodec,
    TimedRun,
    WholeForwards,
    WholeTimes,
    inspect,
    weights_bytes,
)
from shared_hooks.wrapped import WrappedModel

# How long and how often a profiler measures.


@dataclass(frozen=True)
class ProfileOptions:
    """Options of a measurement. Raises SpecError for numbers out of range.

    ``seconds``: the budget; at least one repetition is made. ``pause``: seconds to rest before each measurement, as a
    request's process does while it waits for the network: caches cool, threads sleep, a CPU quota is refilled; without
    it, heads of a small model measured half of what requests then took. ``metrics``: measure as requests with layer
    metrics run: the edge measures them, and both sides collect them.
    """

    warmup: int = 3
    repetitions: int = 20
    seconds: float = 20.0
    codec: str = "raw"
    pause: float = 0.005
    metrics: bool = False
    codecs: tuple[str, ...] = ()
    """Codecs measured beside ``codec``, on the frontiers of its rounds."""
    depth: int | None = None
    """Cuts are ends of modules at most so many levels below the model; None: all."""
    books: Mapping[str, tuple[Book | None, ...]] = field(default_factory=dict, repr=False)
    """By cut, the books of the codec "basis" for its pieces; it is measured at these cuts only, if it is not
    ``codec``.
    """

    def __post_init__(self) -> None:
        for name, least in (("warmup", 0), ("repetitions", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SpecError(f"{name}={value!r}: must be a whole number of at least {least}")
        if not 0 < self.seconds < math.inf:
            raise SpecError(f"seconds={self.seconds}: must be more than 0")
        if not 0 <= self.pause < math.inf:
            raise SpecError(f"pause={self.pause}: must be 0 or more")
        for name in (self.codec, *self.codecs):
            if codecs.by_wire(name) is None:  # names come from a client, which must not register any
                codecs.check(name)


# Every cut of one side: which there is time to measure, the rounds that measure them, and the results.

# Cuts that were not measured: which to measure when there is no time for all, and estimates of the others.

SMALLEST = 4
"""Number of smallest frontiers that are always measured, as likely choices."""


def pick(cuts: Sequence[tuple[int, int]], room: int, wanted: Collection[int] = ()) -> list[int]:
    """Choose the cuts to measure, of (layer id, frontier bytes) in order: all if ``room`` suffices; else the first, the
    last, the `SMALLEST` frontiers, and as many as fit, evenly spaced, of ``wanted`` and then of the others.
    """
    ids = [layer_id for layer_id, _ in cuts]
    if len(ids) <= room:
        return ids
    chosen = {ids[0], ids[-1], *(layer_id for layer_id, _ in sorted(cuts, key=lambda cut: cut[1])[:SMALLEST])}
    for some in ([layer_id for layer_id in ids if layer_id in wanted], ids):
        rest = [layer_id for layer_id in some if layer_id not in chosen]
        places = min(room - len(chosen), len(rest))
        chosen.update(rest[(2 * number + 1) * len(rest) // (2 * places)] for number in range(places))
    return sorted(chosen)


@dataclass(frozen=True)
class MeasuredCut:
    """A measured cut: layer id, and the bytes that cross."""

    layer_id: int
    frontier_bytes: int
    wire_bytes: int
    stages: Mapping[str, Quartiles]


def between(at: float, points: Sequence[tuple[float, float]]) -> float:
    """Interpolate linearly between points (x rising); constant beyond the ends."""
    xs = [x for x, _ in points]
    right = bisect_left(xs, at)
    if right == 0:
        return points[0][1]
    if right == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def estimate(
    layer_id: int, frontier_bytes: int, known: Sequence[MeasuredCut], of_layers: Mapping[str, Callable[[int], float]]
) -> tuple[Mapping[str, Quartiles], int, str]:
    """Estimate an unmeasured cut: its stages, wire bytes and a note; ``known`` in order of layer ids.

    ``of_layers``: for stages that run layers, the sum of those layers' times at a cut; the excess over it is
    interpolated between the measured neighbours. Stages that move bytes are interpolated by bytes, others by layer id.
    """
    stages: dict[str, Quartiles] = {}
    by_bytes = _by_bytes(known)
    for name in known[0].stages:
        ratios = {
            part: between(layer_id, [(one.layer_id, _ratio(one.stages[name], part)) for one in known])
            for part in ("q1", "q3")
        }
        if name in of_layers:
            own = of_layers[name]
            beyond = between(layer_id, [(one.layer_id, one.stages[name].middle - own(one.layer_id)) for one in known])
            median = max(0.0, own(layer_id) + beyond)
        elif name in ("encode", "decode") and name not in _by_layer(known):
            median = between(frontier_bytes, [(one.frontier_bytes, one.stages[name].middle) for one in by_bytes])
        else:
            median = between(layer_id, [(one.layer_id, one.stages[name].middle) for one in known])
        # of two or three measurements the middle may lie outside of the quartiles
        stages[name] = Quartiles(median, median * min(1.0, ratios["q1"]), median * max(1.0, ratios["q3"]), 0)
    overhead = between(layer_id, [(one.layer_id, one.wire_bytes - one.frontier_bytes) for one in known])
    wire = max(0, round(frontier_bytes + overhead))
    return stages, wire, "from the times of its layers and the overhead of the measured cuts next to it"


def estimated_codec(
    layer_id: int, frontier_bytes: int, known: Sequence[tuple[int, int, int, Sequence[TimedCodec]]]
) -> CodecProfile:
    """Estimate a codec at an unmeasured cut.

    ``known``: (layer id, frontier bytes, wire bytes, times) of the measured cuts, in order. Its compression is
    interpolated between the neighbours by layer, its time by bytes.
    """
    shares = [(float(at), wire / max(1, nbytes)) for at, nbytes, wire, _ in known]
    by_size = sorted({nbytes: fmean(one.ns for one in times) for _, nbytes, _, times in known}.items())
    ns = between(frontier_bytes, [(float(nbytes), ns) for nbytes, ns in by_size])
    return CodecProfile(round(between(layer_id, shares) * frontier_bytes), Quartiles(ns, ns, ns, 0))


def _by_bytes(known: Sequence[MeasuredCut]) -> list[MeasuredCut]:
    """Return one cut per size, sizes rising."""
    return sorted({one.frontier_bytes: one for one in known}.values(), key=lambda one: one.frontier_bytes)


def _by_layer(known: Sequence[MeasuredCut]) -> frozenset[str]:
    # the cloud encodes the same answer at every cut: its bytes do not depend on the frontier
    return frozenset({"encode"}) if "compute" in known[0].stages else frozenset()


def _ratio(stage: Quartiles, part: str) -> float:
    return float(getattr(stage, part)) / stage.middle if stage.middle else 1.0


LEAST_ROUNDS = 5
"""Minimum rounds over all cuts; with less time, fewer cuts are measured."""
CODEC_ROUNDS = 3
"""Rounds in which additional codecs are measured; none of them runs a head."""
_CUDA = "torch's CUDA allocator, weights not included"


class Cuts:
    """The cuts of one side. ``timer`` runs this side's part of a cut. ``deadline``: of `time.monotonic`. ``around``:
    run before every measurement. ``refused``: cuts that the plan allows but that failed to run, and why.
    """

    def __init__(
        self,
        plan: Plan,
        timer: HeadTimer | TailTimer,
        options: ProfileOptions,
        deadline: float,
        around: Around | None = None,
    ) -> None:
        self._places = plan.cuts
        shown = {one.name for one in plan.within(options.depth)}
        self.allowed = [one for one in _allowed(plan) if one[0] < 0 or self._places[one[0]].name in shown]
        """(number among the plan's cuts, -1 for "input"; frontier bytes)."""
        self.refused: dict[int, str] = {}
        self._timer = timer
        self._is_edge = isinstance(timer, HeadTimer)
        self._options = options
        self._deadline = deadline
        self._around = around
        self._runs: dict[int, list[TimedRun]] = {}
        self._codecs = tuple(name for name in dict.fromkeys(options.codecs) if name != options.codec)

    def measure(self, first: WholeTimes, forwards: WholeForwards, step: Callable[[int, str], None]) -> None:
        """Measure rounds of a whole forward and every cut, as many as requested or as time allows, at least one.

        ``first``: approximate times of the whole model, which decide how many cuts fit.
        """
        learnt = {number for number, _ in self.allowed if self._name(number) in self._options.books}
        chosen = pick(self.allowed, self._room(first), learnt) if self.allowed else []
        for turn in range(-1, self._options.repetitions):  # the round before the first is a warm-up
            reported = f"round {turn + 1}" if turn >= 0 else "every cut once"
            step(self._options.warmup + turn + 1, reported)
            if turn >= 0:
                self._begin()
                forwards.run_bare()
                self._begin()
                forwards.run()
            for number in chosen:
                if number in self.refused:
                    continue
                if not self._is_edge:
                    step(self._options.warmup + turn + 1, reported)  # a server serves other requests here
                self._begin()
                others = self._codecs if turn < CODEC_ROUNDS and time.monotonic() < self._deadline else ()
                try:
                    run = self._timer.run(self._cut(number), others)
                except IsthmusError as error:
                    self.refused[number] = f"when measured: {error}"
                    continue
                if turn >= 0:
                    self._runs.setdefault(number, []).append(run)
            if turn >= 0 and time.monotonic() > self._deadline:
                break

    def profiles(self, whole: WholeTimes, power: PowerMeters, inspected: Inspection | None) -> tuple[CutProfile, ...]:
        """Return every possible cut, measured or estimated."""
        allowed = [(number, nbytes) for number, nbytes in self.allowed if number not in self.refused]
        known = {
            number: _known(number, nbytes, self._runs[number]) for number, nbytes in allowed if number in self._runs
        }
        if not known:
            return ()
        if self._is_edge:
            of_layers: dict[str, Callable[[int], float]] = {"head": lambda number: whole.until(self._layer_id(number))}
        else:
            everything = whole.until(len(whole.layers))
            of_layers = {"compute": lambda number: everything - whole.until(self._layer_id(number))}
        cuts = []
        for number, nbytes in allowed:
            one = known.get(number)
            if one is not None:
                stages, wire, how = one.stages, one.wire_bytes, ""
                cpu: Quartiles | None = Quartiles.of([run.cpu_ns for run in self._runs[number]])
            else:
                stages, wire, how = estimate(number, nbytes, list(known.values()), of_layers)
                cpu = None
            cuts.append(
                CutProfile(
                    layer_id=self._layer_id(number),
                    name=self._name(number),
                    frontier_bytes=nbytes,
                    wire_bytes=wire,
                    stages=stages,
                    energy=self._energy(power, number, stages, measured=one is not None),
                    memory_peak=self._peak(number, inspected, measured=one is not None),
                    estimated=how,
                    cpu_ns=cpu,
                    codecs=self._others(number, nbytes),
                )
            )
        return tuple(cuts)

    @property
    def refused_layers(self) -> dict[int, str]:
        """Return why a cut after a layer is refused, by layer id."""
        layers = {number: self._places[number] for number in self.refused if number >= 0}
        return {one.layer_id: self.refused[number] for number, one in layers.items() if not one.is_block}

    def _name(self, number: int) -> str:
        return self._places[number].name if number >= 0 else "input"

    def _cut(self, number: int) -> int | str:
        """Return the cut as `WrappedModel.head` takes it: a layer may be called "input"."""
        return self._name(number) if number < 0 or self._places[number].is_block else self._places[number].layer_id

    def _layer_id(self, number: int) -> int:
        """Return the id of the last layer before a cut."""
        return self._places[number].layer_id if number >= 0 else INPUT_CUT

    def _others(self, number: int, nbytes: int) -> dict[str, CodecProfile]:
        """Return the other codecs, measured at this cut or else estimated from others."""
        found = {}
        for name in self._codecs:
            if name == Basis.name and self._name(number) not in self._options.books:
                continue  # codebooks of other cuts do not apply to this one
            known = {
                at: [run.codecs[name] for run in runs if name in run.codecs] for at, runs in sorted(self._runs.items())
            }
            known = {at: times for at, times in known.items() if times}
            if number in known:
                times = known[number]
                found[name] = CodecProfile(times[-1].wire_bytes, Quartiles.of([one.ns for one in times]))
            elif known:
                sizes = dict(self.allowed)
                found[name] = estimated_codec(
                    number, nbytes, [(at, sizes[at], one[-1].wire_bytes, one) for at, one in known.items()]
                )
        return found

    def _room(self, whole: WholeTimes) -> int:
        """Return the number of cuts that can be measured `LEAST_ROUNDS` times, and once for warm-up, in the
        time left.
        """
        left = self._deadline - time.monotonic()
        rounds = 1 + min(LEAST_ROUNDS, self._options.repetitions)
        heads = [whole.until(self._layer_id(number)) / 1e9 for number, _ in self.allowed]
        total = whole.total.median / 1e9
        # a tail runs on the frontier of a head that is run once; no head takes longer than the whole model
        costs = heads if self._is_edge else [total - head for head in heads]
        each = sum(costs) / len(costs) + whole.outside.median / 1e9 + self._options.pause
        once = 0.0 if self._is_edge else total
        return int(max(0.0, left - rounds * (total + self._options.pause)) / max(1e-9, rounds * each + once))

    def _begin(self) -> None:
        """Put the process into the state in which a request finds it."""
        if self._options.pause:  # even a sleep of zero yields the processor
            time.sleep(self._options.pause)
        if self._around is not None:
            self._around.run()

    def _energy(self, power: PowerMeters, number: int, stages: Mapping[str, Quartiles], *, measured: bool) -> Reading:
        """Measure energy by repeating this side's part of the cut while time allows, else return its share."""
        if measured and self._is_edge and time.monotonic() < self._deadline:
            return power.repeat(lambda: self._timer.run(self._cut(number)), "heads")
        return power.share(sum(stage.median for stage in stages.values()))

    def _peak(self, number: int, inspected: Inspection | None, *, measured: bool) -> Reading:
        if not isinstance(self._timer, HeadTimer):
            return Reading.unavailable("measured on the edge only")
        if not measured:
            if inspected is None or number < 0:
                return Reading.unavailable("this cut was not measured, for want of time")
            return Reading.estimated(
                float(inspected.layers[self._layer_id(number)].peak_so_far), f"of a whole forward: {NOTE}"
            )
        try:
            value = float(self._timer.memory_peak(self._cut(number)))
        except Exception as error:  # the head has just run without the ledger: the ledger fails
            return Reading.unavailable(f"{type(error).__name__} under inspection")
        return Reading.measured(value, _CUDA if devices.counts_memory(self._timer.inputs.device) else NOTE)


def _known(layer_id: int, nbytes: int, runs: Sequence[TimedRun]) -> MeasuredCut:
    """Return the runs' stages over the middle half of whole runs, so that the stages add up to it."""
    middle = middle_half(sorted(runs, key=lambda run: sum(run.stages.values())))
    stages = {
        name: replace(
            Quartiles.of([run.stages[name] for run in runs]), middle=fmean(run.stages[name] for run in middle)
        )
        for name in runs[0].stages
    }
    return MeasuredCut(layer_id, nbytes, runs[-1].wire_bytes, stages)


def _allowed(plan: Plan) -> list[tuple[int, int]]:
    """Return (number among `Plan.cuts`, frontier bytes) of every allowed cut, "input" (-1) first."""
    found = [(number, one.frontier_bytes) for number, one in enumerate(plan.cuts) if one.can_split]
    try:
        plan.cutting("input")
    except CutRefused:
        return found
    return [(INPUT_CUT, plan.frontier_bytes("input")), *found]


Progress = Callable[[int, int, str], None]
"""(done, total, the next step). An exception from it ends the profiling."""

WARM_SHARE = 0.2
"""Maximum share of the budget for warm-up."""
TRIED_SHARE = 0.1
"""Maximum share of the budget to try one thread."""


def identity(wrapped: WrappedModel, model_id: str, plan_digest: str) -> ModelIdentity:
    """Identify the model of a profile; hashes the weights."""
    return ModelIdentity(model_id, wrapped.weights_hash(), wrapped.structure_digest(), plan_digest, wrapped.depth)


def profile_edge(
    wrapped: WrappedModel,
    model_id: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: ProfileOptions | None = None,
    *,
    files: Sequence[Path] = (),
    prepare: Callable[[Path], object] | None = None,
    on_progress: Progress | None = None,
) -> Profile:
    """Profile the edge's side. ``prepare`` reads and preprocesses one of ``files``.

    Cuts are measured as a client runs them: with layer metrics if ``options`` say so, whatever the setting of
    ``wrapped`` is. Raises CutRefused for a model whose forwards do not follow its plan, and what the model raises.
    """
    make = _Profiler("edge", wrapped, model_id, args, kwargs, options or ProfileOptions(), on_progress)
    before = wrapped.metrics_enabled
    wrapped.metrics_enabled = make.options.metrics
    try:
        return make.profile(files, prepare)
    finally:
        wrapped.metrics_enabled = before


def profile_cloud(
    wrapped: WrappedModel,
    model_id: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: ProfileOptions | None = None,
    *,
    files: Sequence[Path] = (),
    prepare: Callable[[Path], object] | None = None,
    on_progress: Progress | None = None,
) -> Profile:
    """Profile the cloud's side; every tail runs on a frontier made in this process.

    Call it on one thread; other threads' requests add noise, but do not change the kind of result.
    """
    make = _Profiler("cloud", wrapped, model_id, args, kwargs, options or ProfileOptions(), on_progress)
    return make.profile(files, prepare)


class _Profiler:
    def __init__(
        self,
        side: Side,
        wrapped: WrappedModel,
        model_id: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: ProfileOptions,
        on_progress: Progress | None,
    ) -> None:
        self.side = side
        self.wrapped = wrapped
        self.model_id = model_id
        self.options = options
        self.inputs = Inputs(wrapped, args, kwargs)
        self.on_progress = on_progress or (lambda done, total, what: None)
        self.power = PowerMeters(self.inputs.device)

    def profile(self, files: Sequence[Path], prepare: Callable[[Path], object] | None) -> Profile:
        options, wrapped = self.options, self.wrapped
        self._step(0, "planning")
        args, kwargs = self.inputs.place(*self.inputs.fresh())
        plan = wrapped.plan(*args, **kwargs)
        whose = identity(wrapped, self.model_id, plan.digest)
        about = machine.describe(self.inputs.device)
        idle = self.power.idle()
        deadline = time.monotonic() + options.seconds
        timer: HeadTimer | TailTimer
        if self.side == "edge":
            timer = HeadTimer(wrapped, self.inputs, options.codec, options.books)
        else:
            timer = TailTimer(wrapped, self.inputs, options.codec, metrics=options.metrics)
        names = [layer.name for layer in plan.layers]
        forwards = WholeForwards(wrapped, self.inputs, names, collects=self.side == "edge")
        files = tuple(files) if prepare else ()
        sizes = [_size(path) for path in files]
        answer = self._answer()
        around = Around(answer, files[0] if files else None, prepare) if self.side == "edge" else None
        cuts = Cuts(plan, timer, options, deadline, around)
        cool = throttling()
        first = self._warm(forwards)
        slowed: tuple[str, ...] = ()
        if self.side == "edge":
            slowed = warnings_of_threads(wrapped, self.inputs, options.pause, TRIED_SHARE * options.seconds)
        cuts.measure(first, forwards, self._step)
        whole = forwards.take()
        whole_energy = self.power.repeat(forwards.run_bare, "whole forwards")
        inspected = self._inspect(plan)
        if reasons := throttling().since(cool):
            slowed += (f"measured while the machine was held back: {', '.join(reasons)}",)
        return Profile(
            side=self.side,
            model=whose,
            machine=about,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            settings={
                "device": str(self.inputs.device),
                "threads": about["threads"],
                "warmup": options.warmup,
                "repetitions": options.repetitions,
                "seconds": options.seconds,
                "codec": options.codec,
                "pause": options.pause,
                "metrics": options.metrics,
                **({"codecs": list(options.codecs)} if options.codecs else {}),
            },
            whole_ns=whole.total,
            outside_ns=whole.outside,
            layers=_layers(plan, whole, inspected, cuts.refused_layers),
            cuts=cuts.profiles(whole, self.power, inspected),
            whole_energy=whole_energy,
            idle_power=idle,
            whole_memory_peak=_memory(inspected, inspected.peak if inspected else 0),
            weights_bytes=weights_bytes(wrapped.model),
            answer_bytes=len(answer[0]) + len(answer[1]),
            files=tuple(self._file(*one, prepare, around) for one in zip(files, sizes, strict=True)) if prepare else (),
            bare_ns=whole.bare,
            finish_ns=Quartiles.of(around.finish_ns) if around else None,
            warnings=slowed,
        )

    def _step(self, done: int, what: str) -> None:
        self.on_progress(done, self.options.warmup + self.options.repetitions + 2, what)

    def _warm(self, forwards: WholeForwards) -> WholeTimes:
        """Run whole forwards for warm-up, at least one, and return first times."""
        until = time.monotonic() + WARM_SHARE * self.options.seconds
        for number in range(max(1, self.options.warmup)):
            self._step(number, "warming up")
            forwards.run()
            if time.monotonic() > until:
                break
        return forwards.take()

    def _inspect(self, plan: Plan) -> Inspection | None:
        """Inspect the model; None if it cannot be inspected, as with its own dispatch modes or scripts."""
        try:
            found = inspect(self.wrapped.model, self.wrapped.modules, *self.inputs.place(*self.inputs.fresh()))
        except Exception:  # the whole model has just run without the ledger: the ledger fails
            return None
        return found if len(found.layers) == len(plan.layers) else None

    def _answer(self) -> tuple[bytes, bytes]:
        """Return header and payload of the whole model's answer."""
        args, kwargs = self.inputs.place(*self.inputs.fresh())
        parcel = Parcel.of_value(self.wrapped.forward(*args, **kwargs))
        return parcel.header, b"".join(parcel.buffers)

    def _file(self, path: Path, nbytes: int, prepare: Callable[[Path], object], around: Around | None) -> FileInput:
        """Measure a file. ``around`` has prepared one already, before every measurement."""
        spent = around.prepare_ns[:] if around and around.path is path else []
        for number in range(0 if spent else 1 + self.options.repetitions):
            started = time.perf_counter_ns()
            prepare(path)
            if number:
                spent.append(time.perf_counter_ns() - started)
        return FileInput(path.name, path.suffix.lower(), nbytes, Quartiles.of(spent))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}") from error


def _layers(
    plan: Plan, whole: WholeTimes, inspected: Inspection | None, refused: Mapping[int, str]
) -> tuple[LayerProfile, ...]:
    found = []
    for number, (info, layer) in enumerate(zip(plan.layers, whole.layers, strict=True)):
        seen = inspected.layers[number] if inspected else None
        reason = refused.get(number, info.reason)
        found.append(
            LayerProfile(
                layer_id=info.layer_id,
                name=info.name,
                layer_type=info.layer_type,
                outputs=seen.outputs if seen else (),
                output_bytes=info.output_bytes,
                frontier_bytes=info.frontier_bytes,
                can_split=info.can_split and number not in refused,
                reason=reason,
                inference_ns=layer.inference,
                cpu_ns=layer.cpu,
                energy=layer.energy,
                mean_power=layer.mean_power,
                memory_allocated=_memory(seen, seen.allocated if seen else 0),
                memory_peak=_memory(seen, seen.peak if seen else 0),
                features=seen.features if seen else {},
            )
        )
    return tuple(found)


def _memory(seen: object, value: float) -> Reading:
    return Reading.unavailable("the model could not be inspected") if seen is None else Reading.measured(value, NOTE)
