"""A device of torch's PrivateUse1 kind that is none: its memory is closed to the host, its kernels are the CPU's.

    import studies.device; studies.device.load()      # then torch.device("isolated:0"), --device isolated

What forgets a copy faults; what forgets which device a tensor is on is refused by torch. Built once by torch's own
cpp_extension (`make device`), which needs a C++ compiler. There is one queue, so a forgotten wait does not show.
"""

from __future__ import annotations

import functools
import os
import types
from pathlib import Path
from typing import Any

import torch

NAME = "isolated"
BUILD = Path(__file__).parents[2] / "build" / "device"


@functools.cache
def load(verbose: bool = False) -> Any:
    """Build the device, once, and make it known to torch. Raises OSError without a compiler, RuntimeError where it does
    not build.
    """
    from torch.utils import cpp_extension

    BUILD.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("MAX_JOBS", "2")
    source = str(Path(__file__).with_name("device.cpp"))
    made = cpp_extension.load(
        "isthmus_device", [source], build_directory=str(BUILD), extra_cflags=["-O1"], verbose=verbose
    )
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(made))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return made


def _module(made: Any) -> types.ModuleType:
    """What torch and `shared_hooks.devices` ask of a kind of device."""
    found = types.ModuleType(f"torch.{NAME}")

    def of(device: Any = None) -> None:
        return None

    def set_device(device: Any) -> None:
        made.set_device(device if isinstance(device, int) else torch.device(device).index or 0)

    def rng_state(device: Any = NAME) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(state: torch.Tensor, device: Any = NAME) -> None:
        torch.set_rng_state(state)

    vars(found).update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda seed: None,
        device_count=made.device_count,
        current_device=made.current_device,
        set_device=lambda device: made.set_device(
            torch.device(device).index or 0 if isinstance(device, str) else device
        ),
        synchronize=of,
        get_device_name=lambda device=None: "a device that is none",
        get_rng_state=rng_state,
        set_rng_state=set_rng_state,
        memory_allocated=lambda device=None: made.memory_allocated(),
        max_memory_allocated=lambda device=None: made.max_memory_allocated(),
        reset_peak_memory_stats=lambda device=None: made.reset_peak_memory_stats(),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    )
    return found
