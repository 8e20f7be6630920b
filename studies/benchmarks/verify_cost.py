"""What `verify` costs in three processes, and with a cold model in one, over one warm model: ResNet-18, every cut.

python -m studies.benchmarks.verify_cost
"""

from __future__ import annotations

import time
from functools import partial

import torch
from torch import nn

from shared_hooks import WrappedModel
from studies.benchmarks.networks import ResNet18


def make() -> nn.Module:
    torch.manual_seed(0)
    return ResNet18().eval()


def main() -> None:
    """Prints seconds and ratios of one run."""
    torch.set_num_threads(1)
    x = torch.randn(1, 3, 64, 64)
    seconds = []
    for more in ({}, {"cold": make}, {"cold": partial(make), "processes": True}):
        with WrappedModel(make(), metrics=False) as wrapped:
            wrapped.plan(x)
            began = time.perf_counter()
            assert wrapped.verify(x, **more).ok  # type: ignore[arg-type]
            seconds.append(time.perf_counter() - began)
    warm, cold, apart = seconds
    print(
        f"warm {warm:.2f} s, cold {cold:.2f} s ({cold / warm:.2f}), three processes {apart:.2f} s ({apart / warm:.2f})"
    )


if __name__ == "__main__":
    main()
