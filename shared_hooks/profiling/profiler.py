"""Measures one side of a model: its layers in whole forwards, and its part of every cut.

Repetitions run in rounds, every cut once and then all again, so that a machine that slows down or speeds up meanwhile
does so for all of them. What the budget does not allow to measure is estimated (`estimation`), and says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from shared_hooks.crossing import Parcel
from shared_hooks.errors import SpecError
from shared_hooks.metrics import Reading
from shared_hooks.planning import Plan
from shared_hooks.profiling import machine
from shared_hooks.profiling.around import Around
from shared_hooks.profiling.cuts import Cuts
from shared_hooks.profiling.inspection import NOTE, Inspection, inspect, weights_bytes
from shared_hooks.profiling.options import ProfileOptions
from shared_hooks.profiling.power import Power
from shared_hooks.profiling.profile import FileInput, LayerProfile, ModelIdentity, Profile, Side
from shared_hooks.profiling.quartiles import Quartiles
from shared_hooks.profiling.threads import warnings_of_threads
from shared_hooks.profiling.timers import HeadTimer, Inputs, TailTimer
from shared_hooks.profiling.whole import WholeForwards, WholeTimes
from shared_hooks.wrapped import WrappedModel

__all__ = ["ProfileOptions", "Progress", "identity", "profile_cloud", "profile_edge"]

Progress = Callable[[int, int, str], None]
"""(done, total, what comes next). What it raises ends the profiling."""

WARM_SHARE = 0.2
"""Of the budget, at most, to warm up."""
TRIED_SHARE = 0.1
"""And to try one thread."""


def identity(wrapped: WrappedModel, model_id: str, plan_digest: str) -> ModelIdentity:
    """Whose profile it is; hashes the weights."""
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
    """The edge's side. ``prepare`` reads and preprocesses one of ``files``.

    Cuts are measured as a client runs them: with layer metrics where ``options`` say so, whatever the setting of
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
    """The cloud's side; every tail runs on a frontier that this process made by itself. Call it on one thread; other
    threads' requests disturb the measurement, not the result.
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
        self.power = Power(self.inputs.device)

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
        first = self._warm(forwards)
        slowed: tuple[str, ...] = ()
        if self.side == "edge":
            slowed = warnings_of_threads(wrapped, self.inputs, options.pause, TRIED_SHARE * options.seconds)
        cuts.measure(first, forwards, self._step)
        whole = forwards.take()
        whole_energy = self.power.repeat(forwards.run_bare, "whole forwards")
        inspected = self._inspect(plan)
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
            layers=_layers(plan, whole, inspected, cuts.refused),
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
        """Whole forwards that count for nothing but a first idea of the times; one at least."""
        until = time.monotonic() + WARM_SHARE * self.options.seconds
        for number in range(max(1, self.options.warmup)):
            self._step(number, "warming up")
            forwards.run()
            if time.monotonic() > until:
                break
        return forwards.take()

    def _inspect(self, plan: Plan) -> Inspection | None:
        """None where the model cannot be looked into: its own modes or scripts refuse."""
        try:
            found = inspect(self.wrapped.model, self.wrapped.modules, *self.inputs.place(*self.inputs.fresh()))
        except Exception:  # the whole model has just run without the ledger: what fails is the looking
            return None
        return found if len(found.layers) == len(plan.layers) else None

    def _answer(self) -> tuple[bytes, bytes]:
        """Header and payload of the whole model's."""
        args, kwargs = self.inputs.place(*self.inputs.fresh())
        parcel = Parcel.of_value(self.wrapped.forward(*args, **kwargs))
        return parcel.header, b"".join(parcel.buffers)

    def _file(self, path: Path, nbytes: int, prepare: Callable[[Path], object], around: Around | None) -> FileInput:
        """``around`` has prepared one already, before every measurement."""
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
