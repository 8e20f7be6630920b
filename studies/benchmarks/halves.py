"""CPU time of head and tail together, with records of layers, against the unwrapped whole model: every cut.

Both sides are in this process, so nothing is sent: it is what cutting costs by itself. Head, tail and whole model take
turns, until the ratio is known to 1 % or for `MOST` rounds. One thread, and a heap that keeps its pages.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shared_hooks import WrappedModel
from studies.benchmarks.networks import CLASSICS, built, image
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.timing import cpu_ns, keep_heap, pairwise, timed

MODELS = ("ResNet-18", "AlexNet")
LEAST, MOST = 12, 40
PRECISION = 0.01


def measure(options: Options) -> Row:
    keep_heap()
    lines: list[Line] = []
    details: dict[str, Any] = {}
    for name in MODELS:
        details[name] = found = _model(CLASSICS[name], options)
        worst = max(found, key=lambda one: found[one])
        note = f"{len(found)} cuts; worst after {worst}"
        lines += [
            Line(f"head + tail / whole, CPU, {name}, median", statistics.median(found.values()), "x", 1.03, note),
            Line(f"... {name}, worst", found[worst], "x", 1.06),
        ]
    return Row(tuple(lines), details)


def _model(build: Callable[[], nn.Module], options: Options) -> dict[str, float]:
    """The ratio at each cut of one model."""
    plain, model, x = built(build), built(build), image()
    model.load_state_dict(plain.state_dict(), assign=True)  # the same memory: neither has the warmer caches
    with torch.no_grad(), WrappedModel(model) as wrapped:
        wrapped.plan(x)
        layers = [layer for layer in wrapped.layers if layer.can_split]
        some = layers[:: max(1, len(layers) // 6) if options.quick else 1]
        return {layer.name: _cut(plain, wrapped, layer.layer_id, x, options.repeats(LEAST)) for layer in some}


def _cut(plain: nn.Module, wrapped: WrappedModel, cut: int, x: Tensor, least: int) -> float:
    def halves() -> object:
        return wrapped.forward(wrapped.forward(x, end=cut), start=cut)

    halves()
    mine: list[float] = []
    whole: list[float] = []
    while len(mine) < least or (len(mine) < MOST and pairwise(mine, whole).error > PRECISION):
        whole.append(timed(lambda: plain(x), cpu_ns))
        mine.append(timed(halves, cpu_ns))
    return pairwise(mine, whole).median
