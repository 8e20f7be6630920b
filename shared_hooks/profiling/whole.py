"""Whole forwards with layer metrics: per layer median and quartiles, and what no layer accounts for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from shared_hooks.errors import CutRefused
from shared_hooks.metrics import LayerMetrics, Reading
from shared_hooks.profiling.power import mean_reading
from shared_hooks.profiling.quartiles import Quartiles, middle_half
from shared_hooks.profiling.timers import Inputs, collect, wait_for
from shared_hooks.wrapped import WrappedModel


@dataclass(frozen=True)
class WholeLayer:
    """One layer over all repetitions."""

    inference: Quartiles
    cpu: Quartiles | None
    energy: Reading
    mean_power: Reading


@dataclass(frozen=True)
class WholeTimes:
    """Whole forwards, from placing the inputs to the output. ``outside``: total less the layers, of each forward; on
    the edge, where a forward with metrics collects them before it answers, that is part of it.
    """

    total: Quartiles
    bare: Quartiles
    outside: Quartiles
    layers: tuple[WholeLayer, ...]

    def until(self, layer_id: int) -> float:
        """The sum of the medians of the layers up to one, in nanoseconds; 0 for the cut "input"."""
        return sum(layer.inference.median for layer in self.layers[: layer_id + 1])


class WholeForwards:
    """Runs them one by one, with metrics or bare. ``names``: of the layers that the plan knows; forwards with others
    are left out.

    ``collects``: collecting the metrics counts, where the model's own setting has them on.
    """

    def __init__(self, wrapped: WrappedModel, inputs: Inputs, names: Sequence[str], *, collects: bool = False) -> None:
        self._wrapped = wrapped
        self._inputs = inputs
        self._names = list(names)
        self._collects = collects
        self._forwards: list[tuple[int, list[LayerMetrics]]] = []
        self._bare: list[int] = []

    def run_bare(self) -> None:
        """One forward as a request runs it. Raises what the model raises."""
        args, kwargs = self._inputs.fresh()
        started = time.perf_counter_ns()
        args, kwargs = self._inputs.place(args, kwargs)
        self._wrapped.forward(*args, **kwargs)
        wait_for(self._inputs.device)
        if self._collects:
            collect(self._wrapped)
        self._bare.append(time.perf_counter_ns() - started)

    def run(self) -> None:
        """One forward, with layer metrics whatever the model's own setting is. Raises what the model raises."""
        wrapped = self._wrapped
        before = wrapped.metrics_enabled
        wrapped.metrics_enabled = True
        args, kwargs = self._inputs.fresh()
        try:
            started = time.perf_counter_ns()
            args, kwargs = self._inputs.place(args, kwargs)
            wrapped.forward(*args, **kwargs)
            wait_for(self._inputs.device)
            if self._collects and before:
                collect(wrapped)
            total = time.perf_counter_ns() - started
            layers = wrapped.get_layer_metrics()
        finally:
            wrapped.metrics_enabled = before
        if [layer.name for layer in layers] == self._names:
            self._forwards.append((total, layers))

    def take(self) -> WholeTimes:
        """What the forwards since the last call come to.

        Raises CutRefused for a model that never took the planned path.
        """
        forwards, self._forwards = self._forwards, []
        bare, self._bare = self._bare, []
        if not forwards:
            raise CutRefused("the model takes another path through its layers each time it runs on the same input")
        forwards.sort(key=lambda forward: forward[0])
        totals = [total for total, _ in forwards]
        columns = list(zip(*(layers for _, layers in forwards), strict=True))
        return WholeTimes(
            _of(totals),
            Quartiles.of(bare or totals),
            _of([total - sum(layer.inference_ns for layer in layers) for total, layers in forwards]),
            tuple(_layer(column) for column in columns),
        )


def _of(values: Sequence[float]) -> Quartiles:
    """Quartiles of forwards in the order of their totals. The middle half is that of the forwards: the layers' middles
    and the outside's add up to the whole's.
    """
    return replace(Quartiles.of(values), middle=fmean(middle_half(values)))


def _layer(column: Sequence[LayerMetrics]) -> WholeLayer:
    cpu = [layer.cpu_ns for layer in column if layer.cpu_ns is not None]
    return WholeLayer(
        _of([layer.inference_ns for layer in column]),
        Quartiles.of(cpu) if len(cpu) == len(column) else None,
        mean_reading([layer.energy for layer in column]),
        mean_reading([layer.mean_power for layer in column]),
    )
