"""A device of torch's PrivateUse1 kind that is none: its memory is closed to the host, its kernels are the CPU's.

    import studies.device; studies.device.load()      # then torch.device("isolated:0"), --device isolated

What forgets a copy faults; what forgets which device a tensor is on is refused by torch; what forgets a wait, a stream
or `record_stream` is a race, which raises where it happens and is kept in `races()`; a copy that nobody waited for has
not arrived. Built once by torch's own cpp_extension (`make device`), which needs a C++ compiler.
"""

from __future__ import annotations

import contextlib
import functools
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

NAME = "isolated"
PRIVATE_USE_1 = 20
"""torch's number for this kind."""
HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "device"


@functools.cache
def load() -> Any:
    """Build the device, once, and make it known to torch. Raises OSError without a compiler, RuntimeError where it does
    not build.
    """
    from torch.utils import cpp_extension

    BUILD.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("MAX_JOBS", "2")
    source = str(HERE / "device.cpp")
    made = cpp_extension.load("isthmus_device", [source], build_directory=str(BUILD), extra_cflags=["-O1"])
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(made))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return made


def _module(made: Any) -> types.ModuleType:
    """What torch and `shared_hooks.devices` ask of a kind of device."""
    found = types.ModuleType(f"torch.{NAME}")

    def number(device: Any) -> int:
        index = device if isinstance(device, int) or device is None else torch.device(device).index
        return int(made.current_device() if index is None else index)

    def current_stream(device: Any = None) -> torch.Stream:
        return torch.Stream(
            stream_id=made.current_stream(number(device)), device_index=number(device), device_type=PRIVATE_USE_1
        )

    @contextlib.contextmanager
    def stream(other: torch.Stream | None) -> Iterator[None]:
        if other is None:
            yield
            return
        index = other.device_index
        before, device = made.current_stream(index), made.current_device()
        made.set_device(index)
        made.set_stream(index, other.stream_id)
        try:
            yield
        finally:
            made.set_stream(index, before)
            made.set_device(device)

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
        set_device=lambda device: made.set_device(number(device)),
        synchronize=lambda device=None: made.synchronize(number(device)),
        current_stream=current_stream,
        stream=stream,
        Stream=lambda device=None: torch.Stream(device=torch.device(NAME, number(device))),
        Event=lambda enable_timing=False: torch.Event(device=NAME, enable_timing=enable_timing),
        get_device_name=lambda device=None: "a device that is none",
        get_rng_state=rng_state,
        set_rng_state=set_rng_state,
        memory_allocated=lambda device=None: made.memory_allocated(),
        max_memory_allocated=lambda device=None: made.max_memory_allocated(),
        reset_peak_memory_stats=lambda device=None: made.reset_peak_memory_stats(),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    )
    return found


def races() -> list[str]:
    """Uses of memory that no wait put in order, since the last call."""
    found: list[str] = load().races()
    return found
