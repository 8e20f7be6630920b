"""What the hooks cost a layer in a whole forward: (wrapped - unwrapped) / layers, in CPU time.

On networks of very many layers that do almost nothing, so that the difference is large against the noise: a flat chain,
and blocks of four layers with a skip connection, where the containers' calls are paid for by their layers.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor, nn

from shared_hooks import WrappedModel
from studies.benchmarks.networks import built
from studies.benchmarks.row import Line, Options, Row
from studies.benchmarks.timing import cpu_ns, interleave, spreads

LIMITS_US = {"off": 10.0, "on": 25.0, "on, records read": 25.0}
LAYERS = 1000


class Chain(nn.Sequential):
    """`LAYERS` layers in a row."""

    def __init__(self) -> None:
        super().__init__(*(nn.ReLU() for _ in range(LAYERS)))


class Skip(nn.Module):
    """Four layers and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU(), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.body(x)
        return result


class Blocks(nn.Sequential):
    """As many layers, four to a block."""

    def __init__(self) -> None:
        super().__init__(*(Skip() for _ in range(LAYERS // 4)))


def measure(options: Options) -> Row:
    details: dict[str, Any] = {"layers": LAYERS}
    cost: dict[str, dict[str, float]] = {}
    x = torch.zeros(1, 8)
    for form in (Chain, Blocks):
        plain = built(form)
        with (
            torch.no_grad(),
            WrappedModel(built(form), metrics=False) as without,
            WrappedModel(built(form), metrics=True) as timing,
        ):
            run = {
                "plain": lambda plain=plain: plain(x),
                "off": lambda without=without: without.forward(x),
                "on": lambda timing=timing: timing.forward(x),
                "on, records read": lambda timing=timing: (timing.forward(x), timing.get_layer_metrics()),
            }
            measured = interleave(run, options.repeats(100), cpu_ns, warm_up=3)
        base = statistics.median(measured["plain"])
        cost[form.__name__] = {name: (statistics.median(measured[name]) - base) / LAYERS / 1e3 for name in LIMITS_US}
        details[form.__name__] = {
            "us_per_layer": cost[form.__name__],
            "us_per_forward": {name: one.as_dict() for name, one in spreads(measured, 1e-3).items()},
        }
    lines = []
    for name, limit in LIMITS_US.items():
        worst = max(cost, key=lambda form: cost[form][name])
        note = ", ".join(f"{form.lower()} {values[name]:.1f}" for form, values in cost.items())
        lines.append(Line(f"hook cost per layer, metrics {name}", cost[worst][name], "us", limit, note))
    return Row(tuple(lines), details)
