"""CPU time of the tail against what the whole model spends after the cut.

The model's own tail, "whole model - head", is taken within one run of the unwrapped model: a plain forward hook on the
cut layer reads the clock, the rest of the run is the true tail. (The difference of two runs is the same number with the
noise of both; it is in the details as ``by_difference``, there with the engine's own head and so with its hooks.) The
engine's tail is `WrappedModel.forward(early, start=cut)` with metrics on, on an `EarlyOutput` that is used again and
again. Every cut is measured in turns, until the ratio of neighbouring runs is known to 1 % (their spread decides, not
their value), or for `MOST` rounds. One thread, and a heap that keeps its pages (`keep_heap`), for both sides.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shared_hooks import EarlyOutput, WrappedModel
from studies.benchmarks.networks import CLASSICS, built, image
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.timing import Spread, cpu_ns, keep_heap, pairwise, ratio, timed

SHORTEST_NS = 5_000_000
LEAST, MOST = 15, 40
PRECISION = 0.01


@dataclass
class Cut:
    """Nanoseconds of every round at one cut."""

    model: str
    layer_id: int
    name: str
    whole: list[float] = field(default_factory=list)
    true_tail: list[float] = field(default_factory=list)
    head: list[float] = field(default_factory=list)
    tail: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The median over the rounds, so that a change of the machine's speed half-way weighs on both sides."""
        return pairwise(self.tail, self.true_tail).median

    def as_dict(self) -> dict[str, Any]:
        left = statistics.median(self.whole) - statistics.median(self.head)
        return {
            "model": self.model,
            "layer_id": self.layer_id,
            "name": self.name,
            "rounds": len(self.tail),
            "ratio": self.ratio,
            "ratio_of_medians": ratio(self.tail, self.true_tail),
            "ratio_spread": pairwise(self.tail, self.true_tail).as_dict(),
            "by_difference": statistics.median(self.tail) / left,
            "ms": {
                name: Spread.of(getattr(self, name)).scaled(1e-6).as_dict()
                for name in ("whole", "true_tail", "head", "tail")
            },
        }


class Marked:
    """The unwrapped model with a clock reading after one layer call."""

    def __init__(self, model: nn.Module, layer_name: str) -> None:
        path, _, number = layer_name.partition("#")
        self._model = model
        self._call = int(number or 1)
        self._left = 0
        self._marked = 0
        self._handle = model.get_submodule(path).register_forward_hook(self._hook)

    def _hook(self, *_: object) -> None:
        self._left -= 1
        if self._left == 0:
            self._marked = cpu_ns()

    def run(self, x: Tensor) -> tuple[int, int]:
        """CPU nanoseconds of the whole model, and of its part after the cut."""
        self._left = self._call
        start = cpu_ns()
        self._model(x)
        end = cpu_ns()
        return end - start, end - self._marked

    def close(self) -> None:
        self._handle.remove()


def measure(options: Options) -> Row:
    keep_heap()
    cuts: list[Cut] = []
    for name, build in CLASSICS.items():
        found = measure_model(name, build, options)
        options.say(f"  {name}: {len(found)} tails over 5 ms")
        cuts += found
    return Row(tuple(_lines(cuts)), {"cuts": [cut.as_dict() for cut in cuts]})


def measure_model(name: str, build: Callable[[], nn.Module], options: Options) -> list[Cut]:
    """Every cut of one model whose tail is long enough."""
    plain, model, x = built(build), built(build), image()
    model.load_state_dict(plain.state_dict(), assign=True)  # the same memory: neither has the warmer caches
    found: list[Cut] = []
    with torch.no_grad(), WrappedModel(model) as wrapped:
        wrapped.plan(x)
        layers = [layer for layer in wrapped.layers if layer.can_split]
        for layer in layers[:: max(1, len(layers) // 6) if options.quick else 1]:
            cut = Cut(name, layer.layer_id, layer.name)
            marked = Marked(plain, layer.name)
            early = wrapped.forward(x, end=layer.layer_id)
            _rounds(cut, marked, wrapped, early, x, options.repeats(LEAST), 1 if options.quick else MOST)
            marked.close()
            if cut.true_tail and statistics.median(cut.true_tail) >= SHORTEST_NS:
                found.append(cut)
    return found


def _rounds(
    cut: Cut, marked: Marked, wrapped: WrappedModel, early: EarlyOutput, x: Tensor, least: int, most: int
) -> None:
    look = [marked.run(x)[1] for _ in range(3)]
    if statistics.median(look) < 0.8 * SHORTEST_NS:
        return
    wrapped.forward(early, start=cut.layer_id)
    while len(cut.tail) < least or (len(cut.tail) < most and _error(cut) > PRECISION):
        whole, true_tail = marked.run(x)
        cut.whole.append(whole)
        cut.true_tail.append(true_tail)
        cut.head.append(timed(lambda: wrapped.forward(x, end=cut.layer_id), cpu_ns))
        cut.tail.append(timed(lambda: wrapped.forward(early, start=cut.layer_id), cpu_ns))


def _error(cut: Cut) -> float:
    return pairwise(cut.tail, cut.true_tail).error


def _lines(cuts: list[Cut]) -> list[Line]:
    if not cuts:
        return [Line("tail / (whole - head), CPU, median", float("nan"), "x", 1.05, "no tail is over 5 ms here")]
    rounds = [len(cut.tail) for cut in cuts]
    worst = max(cuts, key=lambda cut: cut.ratio)
    known = pairwise(worst.tail, worst.true_tail)
    lines = [
        Line(
            "tail / (whole - head), CPU, median",
            statistics.median(cut.ratio for cut in cuts),
            "x",
            1.05,
            f"{len(cuts)} cuts with tails over 5 ms, {min(rounds)} to {max(rounds)} rounds each",
        ),
        Line(
            "tail / (whole - head), CPU, worst",
            worst.ratio,
            "x",
            1.10,
            f"{worst.model} after {worst.name}; quartiles {known.low:.3f} to {known.high:.3f}",
        ),
    ]
    for name in dict.fromkeys(cut.model for cut in cuts):
        own = [cut for cut in cuts if cut.model == name]
        ratios = [cut.ratio for cut in own]
        lines.append(
            Line(f"  {name}, median", statistics.median(ratios), "x", None, f"{len(own)} cuts, worst {max(ratios):.3f}")
        )
    return lines
