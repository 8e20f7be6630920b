"""What bounding the kernels of a tail costs whose Python reads its data: 602 small kernels, with the bound and without.

python -m studies.benchmarks.allowance_cost
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from shared_hooks import EarlyOutput, WrappedModel

TURNS = 300


class Reads(nn.Module):
    """(B, 8) -> (B, 8); a number of the data goes into each of its turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        number = float(y.max())
        for _ in range(TURNS):
            y = (y + number).tanh()
        found: torch.Tensor = self.last(y)
        return found


def main() -> None:
    """Prints milliseconds of a tail, medians of one run, in turns."""
    torch.set_num_threads(1)
    edge, cloud = WrappedModel(Reads().eval(), metrics=False), WrappedModel(Reads().eval(), metrics=False)
    early = edge.head("first", torch.randn(2, 8))
    data = early.to_bytes()
    recipe = cloud.recipes.recipe(early, torch.device("cpu"))
    most, seconds = recipe.most, dict[bool, list[float]]({True: [], False: []})
    assert most is not None
    for turn in range(100):
        for bounded in (True, False):
            recipe.most = most if bounded else None
            came = EarlyOutput.from_bytes(data)
            began = time.perf_counter()
            cloud.tail(came)
            if turn >= 10:
                seconds[bounded].append(time.perf_counter() - began)
    with_it, without = (1000 * statistics.median(seconds[bounded]) for bounded in (True, False))
    each = 1000 * (with_it - without) / (2 * TURNS + 2)
    print(f"bounded {with_it:.2f} ms, not bounded {without:.2f} ms: {each:.1f} us a kernel")


if __name__ == "__main__":
    main()
