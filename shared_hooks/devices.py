"""Wrap devices of any kind that torch has: names, streams, events, memory, random numbers.

Every kind has a module of its own in torch (`torch.cuda`, `torch.xpu`, `torch.mps`, or one that a plug-in brings for
PrivateUse1), with the same functions under the same names. Missing ones are handled by kind: a device without streams
has one queue, and one without memory counts reports nothing. CUDA-only functions are at the end.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch

from shared_hooks.errors import SpecError, near

CPU: Final = torch.device("cpu")
HOST: Final = ("cpu", "meta")
NO_FLOAT64: Final = ("mps",)
"""Kinds without 64-bit floats."""


def _has_autocast(kind: str) -> bool:
    try:
        torch.is_autocast_enabled(kind)
        torch.get_autocast_dtype(kind)
    except (RuntimeError, TypeError):
        return False
    return True


AUTOCAST: Final = tuple(kind for kind in ("cpu", "cuda", "xpu", "mps") if _has_autocast(kind))
"""Kinds with autocast in this torch."""


def is_host(device: torch.device) -> bool:
    """Return whether it is the processor: its memory is the host's, and its work is done when a call returns."""
    return device.type in HOST


def kinds() -> tuple[str, ...]:
    """Return kinds of devices that this torch and this machine have, the best first; "cpu" last."""
    found = [kind for kind in ("cuda", "xpu", "mps", _private()) if kind and count(kind)]
    return (*found, "cpu")


def _private() -> str | None:
    """Return the name that a plug-in has given to its own kind."""
    name = torch._C._get_privateuse1_backend_name()
    return name if hasattr(torch, name) else None


def count(kind: str) -> int:
    """Return the number of devices of a kind."""
    module = getattr(torch, kind, None)
    if module is None or not getattr(module, "is_available", lambda: False)():
        return 0
    return int(getattr(module, "device_count", lambda: 1)())


def pick(name: str = "auto") -> torch.device:
    """Return the device called ``name``: a kind, with an optional index after a colon; "auto": the first of the best
    kind.

    Raises SpecError for one that this machine or this torch does not have, with those it has.
    """
    there = kinds()
    if name == "auto":
        name = there[0]
    if name == "cpu":
        return torch.device("cpu")
    kind, colon, number = name.partition(":")
    if kind not in there:
        why = "is built without CUDA" if kind == "cuda" and torch.version.cuda is None else "finds none here"
        listed = f"expected auto, {', '.join(there)}"
        why = f"torch {torch.__version__} {why}; {listed}"
        raise SpecError(f"device {name!r:.60} is not available: {why}{'.' * bool(alike := near(kind, there))}{alike}")
    if colon and not (number.isascii() and number.isdigit()):
        raise SpecError(f'device {name!r:.60}: expected "{kind}" or "{kind}:N"')
    if int(number or 0) >= count(kind):
        raise SpecError(f"device {name!r} is not available: this machine has {count(kind)} of them, counted from 0")
    return torch.device(kind, int(number or 0))


def name_of(device: torch.device) -> str:
    """Return the maker's name of it; the kind if torch does not know one."""
    named = getattr(_module(device), "get_device_name", None) if count(device.type) else None
    return str(named(device)) if named is not None else device.type


def properties(device: torch.device) -> Any:
    """Return torch's properties of it; None if it has none."""
    found = getattr(_module(device), "get_device_properties", None)
    return None if found is None else found(_index(device))


def refuses(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether it does not support the dtype."""
    return device.type in NO_FLOAT64 and dtype in (torch.float64, torch.complex128)


# -- work that is queued


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work; no effect on the host."""
    if not is_host(device):
        _module(device).synchronize(*(() if device.type == "mps" else (device,)))


def has_streams(device: torch.device) -> bool:
    """Return whether it has several queues."""
    return device.type not in HOST and hasattr(_module(device), "current_stream")


def current_stream(device: torch.device) -> Any:
    """Return this thread's stream; None without streams."""
    return _module(device).current_stream(device) if has_streams(device) else None


def new_stream(device: torch.device) -> Any:
    return _module(device).Stream(device)


def on_stream(stream: Any, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Send this thread's work to ``stream`` in the block; None: unchanged."""
    return contextlib.nullcontext() if stream is None else _module(device).stream(stream)


def pins(device: torch.device) -> bool:
    """Return whether copies from pinned host memory are faster, and asynchronous."""
    return device.type not in HOST and has_streams(device) and device.type in ("cuda", "xpu", _private())


def new_event(device: torch.device, *, timing: bool = False) -> Any:
    return _module(device).Event(enable_timing=timing)


def has_timers(device: torch.device) -> bool:
    """Return whether its events measure time."""
    return has_streams(device) and hasattr(_module(device), "Event")


def wait_for_stream(device: torch.device) -> None:
    """Wait until the device has finished the work of this thread's stream; other streams continue. Raises its
    errors.
    """
    if has_streams(device):
        done = new_event(device)
        done.record(current_stream(device))
        done.synchronize()
    else:
        synchronize(device)


# -- memory and random numbers


class Allocated(NamedTuple):
    """Bytes in torch's allocator: held now, and their maximum since the process began or the last reset."""

    held: int
    peak: int


def counts_memory(device: torch.device) -> bool:
    """Return whether torch's allocator counts the bytes held and their maximum."""
    return not is_host(device) and hasattr(_module(device), "max_memory_allocated")


def allocated(device: torch.device) -> Allocated:
    """Return the counts of a device that `counts_memory`."""
    module = _module(device)
    if device.type == "cuda":  # memory_allocated flattens and sorts some hundred numbers to return one of them
        counts = module.memory_stats_as_nested_dict(_index(device))["allocated_bytes"]["all"]
        return Allocated(counts["current"], counts["peak"])
    return Allocated(module.memory_allocated(device), module.max_memory_allocated(device))


def in_use(device: torch.device) -> int | None:
    """Return the bytes that all processes hold on the device; None if torch does not report it."""
    asks = None if is_host(device) else getattr(_module(device), "mem_get_info", None)
    if asks is None:
        return None
    free, total = asks(device)
    return int(total - free)


def free(device: torch.device) -> int | None:
    """Return free memory in bytes; None if torch does not report it."""
    found = getattr(_module(device), "mem_get_info", None) if count(device.type) else None
    return None if found is None else int(found(_index(device))[0])


def reset_peak(device: torch.device) -> None:
    """Reset the maximum of a device that `counts_memory`."""
    _module(device).reset_peak_memory_stats(device)


_generator = threading.RLock()
"""Held while the state of the processor's generator is copied or set.

torch locks a mutex for both, and makes the Python object of a copy under it. Before Python 3.12 that may collect
garbage, and so let another thread run; if that one waits for the mutex, it keeps the interpreter's lock: both hang.
"""


def rng_state(device: torch.device | None = None) -> torch.Tensor:
    """Return a copy of its generator's state, on the host; without a device, of the processor's generator."""
    if device is None or is_host(device):
        with _generator:
            return torch.default_generator.get_state()
    found: torch.Tensor = _module(device).get_rng_state(*(() if device.type == "mps" else (device,)))
    return found


def set_rng_state(state: torch.Tensor, device: torch.device | None = None) -> None:
    """Set what `rng_state` returned. Raises torch's errors for an invalid state."""
    if device is None or is_host(device):
        with _generator:
            torch.default_generator.set_state(state)
    else:
        _module(device).set_rng_state(state, *(() if device.type == "mps" else (device,)))


@contextlib.contextmanager
def forked(device: torch.device | None = None, *, seed: int | None = None) -> Iterator[None]:
    """Restore the generators of the processor and of ``device`` after the block. ``seed``: of the processor's in the
    block.
    """
    away = None if device is None or is_host(device) else device
    host, other = rng_state(), None if away is None else rng_state(away)
    try:
        if seed is not None:
            with _generator:
                torch.default_generator.manual_seed(seed)
        yield
    finally:
        set_rng_state(host)
        if other is not None:
            set_rng_state(other, away)


def initialized() -> torch.device | None:
    """Return the current device of the kind that this process has initialised; None: only the processor."""
    for kind in ("cuda", "xpu", _private()):
        module = getattr(torch, kind, None) if kind else None
        if module is not None and getattr(module, "is_initialized", lambda: False)():
            return torch.device(str(kind), module.current_device())
    return None


def _module(device: torch.device) -> Any:
    return getattr(torch, device.type)


def _index(device: torch.device) -> int:
    index: int | None = device.index
    return index if index is not None else int(getattr(_module(device), "current_device", lambda: 0)())


# -- CUDA only: graphs, NVML's numbers


def has_graphs(device: torch.device) -> bool:
    """Return whether kernels can be recorded once and replayed as one."""
    return device.type == "cuda" and torch.cuda.is_available()


def recorded(device: torch.device, run: Any, warm_runs: int) -> tuple[Any, Any]:
    """Record ``run`` as a graph, and return it with its result, whose memory each replay fills again. Raises torch's
    errors.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(warm_runs):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # other threads may use the device meanwhile
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = run()
    return graph, result


def uuid_of(device: torch.device) -> tuple[int, str]:
    """Return NVML's index and UUID of a GPU."""
    uuid = getattr(torch.cuda.get_device_properties(_index(device)), "uuid", None)
    return _index(device), "" if uuid is None else f"GPU-{uuid}"
