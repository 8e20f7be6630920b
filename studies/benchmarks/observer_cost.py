"""What observers cost: 100 of them, each looking at every 100th forward of a ResNet-18, against none.

In turns: a forward without observers, one that all of them look at, and one that none looks at though they are there;
of a hundred forwards there is one of the former kind and 99 of the latter. CPU time; which of them comes first changes.
Each observer looks at one layer, all layers in turn; and, to see where the limit is, each at all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from shared_hooks import WrappedModel
from shared_hooks.observers import ActivationStats
from shared_hooks.observers.base import leaves
from studies.benchmarks.networks import ResNet18, built, image
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.timing import Spread, cpu_ns, timed

LIMIT_PERCENT = 2.0
OBSERVERS = 100
EVERY = 100


def measure(options: Options) -> Row:
    x, model = image(), built(ResNet18)
    names = list(leaves(model).values())
    one_each = [names[number % len(names)] for number in range(OBSERVERS)]
    lines: list[Line] = []
    details: dict[str, Any] = {"observers": OBSERVERS, "every_n": EVERY, "layers": len(names)}
    with torch.no_grad(), WrappedModel(model, metrics=False) as wrapped:
        wrapped.plan(x)
        plain: tuple[str, Any, Callable[[Any], Any]] = ("module", model, lambda x: model(x))
        for title, target, forward in (("wrapped", wrapped, wrapped.forward), plain):
            for kind, targets in (("a layer each", one_each), ("all layers each", [None] * OBSERVERS)):
                spread = _percent(target, targets, lambda forward=forward: forward(x), options.repeats(120))
                details[f"{title}, {kind}"] = spread.as_dict()
                lines.append(
                    Line(
                        f"{OBSERVERS} observers every {EVERY} forwards, ResNet-18 {title}, {kind}",
                        spread.median,
                        "%",
                        LIMIT_PERCENT if targets is one_each else None,
                        f"quartiles {spread.low:.2f} to {spread.high:.2f}",
                    )
                )
        chance = _percent(wrapped, [], lambda: wrapped.forward(x), options.repeats(120))
        details["none"] = chance.as_dict()
        note = f"quartiles {chance.low:.2f} to {chance.high:.2f}"
        lines.append(Line("... and no observers against none, by chance", chance.median, "%", None, note))
    return Row(tuple(lines), details)


def _percent(target: Any, targets: list[Any], forward: Callable[[], Any], repeats: int) -> Spread:
    """What the observers add to a hundred forwards, in per cent of these."""

    def plain() -> int:
        forward()
        return timed(forward, cpu_ns)

    def observed() -> tuple[int, int]:
        with ExitStack() as stack:
            for targets_of_one in targets:
                # what a forward costs does not depend on how many there are between two that are looked at
                stack.enter_context(ActivationStats(targets_of_one, every_n=3).attach(target))
            forward()
            forward()
            idle = timed(forward, cpu_ns)
            return timed(forward, cpu_ns), idle

    found: list[float] = []
    for number in range(-3, repeats):
        if number % 2:
            base = plain()
            looked_at, idle = observed()
        else:
            looked_at, idle = observed()
            base = plain()
        if number >= 0:
            found.append((looked_at - base + (EVERY - 1) * (idle - base)) / (EVERY * base) * 100)
    return Spread.of(found)
