"""What metrics cost a whole forward: metrics on by metrics off, in wall-clock time, neighbouring runs divided.

One model, wrapped twice, so that both run the same weights. The order within a pair changes every time, so that neither
always comes second. The sampling thread runs as it does in service.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shared_hooks import WrappedModel
from studies.benchmarks.networks import ResNet18, built, image
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.timing import Spread, pairwise, timed, wall_ns

LIMIT = 1.03


def measure(options: Options) -> Row:
    x, model = image(), built(ResNet18)
    with torch.no_grad(), WrappedModel(model, metrics=False) as off, WrappedModel(model) as on:

        def with_records() -> Any:
            on.forward(x)
            return on.get_layer_metrics(), on.get_forward_metrics()

        forward = _ratios(lambda: on.forward(x), lambda: off.forward(x), options.repeats(300))
        records = _ratios(with_records, lambda: off.forward(x), options.repeats(300))
        # the same against itself: how far from 1 a ratio gets here by chance
        chance = _ratios(lambda: off.forward(x), lambda: off.forward(x), options.repeats(300))
    details = {name: spread.as_dict() for name, spread in (("on", forward), ("records", records), ("off", chance))}
    quartiles = f"quartiles {forward.low:.3f} to {forward.high:.3f}, median +- {forward.error:.3f}"
    return Row(
        (
            Line("metrics on by off, ResNet-18, a forward", forward.median, "x", LIMIT, quartiles),
            Line("... and the records read", records.median, "x", LIMIT, f"off by off: {chance.median:.3f}"),
        ),
        details,
    )


def _ratios(above: Callable[[], Any], below: Callable[[], Any], repeats: int) -> Spread:
    first: list[int] = []
    second: list[int] = []
    for number in range(-3, repeats):
        if number % 2:
            b = timed(below, wall_ns)
            a = timed(above, wall_ns)
        else:
            a = timed(above, wall_ns)
            b = timed(below, wall_ns)
        if number >= 0:
            first.append(a)
            second.append(b)
    return pairwise(first, second)
