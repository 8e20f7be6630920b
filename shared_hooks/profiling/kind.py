"""What two machines must have alike for a model to give the same bits on both: release of torch, device, processor,
threads. Said in the greeting; nobody is refused for it.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping

import torch

from shared_hooks.profiling.machine import processor


def kind(device: torch.device) -> dict[str, str]:
    """``torch``, ``kind`` ("cpu", "cuda NVIDIA H100"), ``processor`` with the vector unit in use, ``threads``."""
    return {
        "torch": str(torch.__version__),
        "kind": f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type,
        "processor": _processor(),
        "threads": str(torch.get_num_threads()),
    }


def unlike(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """In words, what is not alike for the bits. What a side does not say counts as alike: silence excuses nothing.

    A GPU's kernels are its own, whatever the processor beside it.
    """
    names = ("torch", "kind") if mine["kind"].startswith("cuda") else ("torch", "kind", "processor", "threads")
    differ = [name for name in names if theirs.get(name, mine[name]) != mine[name]]
    return [f"{name} {mine[name]} here, {theirs[name]} there" for name in differ]


@functools.cache
def _processor() -> str:
    unit = torch.backends.cpu.get_cpu_capability()
    return f"{processor()[0] or platform.machine()}, {unit}"
