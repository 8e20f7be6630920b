"""The settings of the process and of the thread that a forward may change. Random numbers are `dice`'s."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import DeviceContext

_DEVICES = ("cpu", "cuda")


def _device() -> torch.device | None:
    """What tensors are made on by default. `torch.get_default_device` says the same in ten times the time,
    and planning asks after many a layer.
    """
    for place in reversed(range(torch._C._len_torch_function_stack())):
        mode = torch._C._get_function_stack_at(place)
        if isinstance(mode, DeviceContext):
            return torch.device(mode.device)
    return None


def _autocast() -> tuple[Any, ...]:
    return tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES)


def _set_autocast(value: tuple[Any, ...]) -> None:
    for device, (enabled, dtype) in zip(_DEVICES, value, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _attention() -> tuple[bool, ...]:
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()


def _set_attention(value: tuple[bool, ...]) -> None:
    torch.backends.cuda.enable_flash_sdp(value[0])
    torch.backends.cuda.enable_mem_efficient_sdp(value[1])
    torch.backends.cuda.enable_math_sdp(value[2])


def _flags() -> tuple[Any, ...]:
    backends = torch.backends
    return (
        backends.mkldnn.enabled,
        backends.cudnn.enabled,
        backends.cudnn.benchmark,
        backends.cuda.matmul.allow_tf32,
        backends.cudnn.allow_tf32,
    )


def _set_flags(value: tuple[Any, ...]) -> None:
    backends: Any = torch.backends
    torch._C._set_mkldnn_enabled(value[0])
    backends.cudnn.enabled, backends.cudnn.benchmark = value[1:3]
    backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32 = value[3:]


def _flushes_denormals() -> bool:
    """Of this thread. torch tells nobody, but Python divides by the same unit."""
    return sys.float_info.min / 2 == 0.0


_OWN = {name: value for name, value in vars(torch.nn.functional).items() if callable(value)}


def _functional() -> dict[str, Any]:
    """Functions that stand in place of torch's own. Others in this process may have put some there for a while (a
    compiler does): what was there before a run and is not torch's is nobody's to put back.
    """
    space = vars(torch.nn.functional)
    return {name: space.get(name) for name, value in _OWN.items() if space.get(name) is not value}


def _set_functional(value: dict[str, Any]) -> None:
    space = vars(torch.nn.functional)
    for name in _functional():
        if name not in value:
            space[name] = _OWN[name]


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (_device, torch.set_default_device),
    "torch's gradient mode": (torch.is_grad_enabled, torch._C._set_grad_enabled),
    "torch's autocast": (_autocast, _set_autocast),
    "torch's deterministic algorithms": (
        _deterministic,
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "torch's float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's attention kernels": (_attention, _set_attention),
    "torch's backend flags": (_flags, _set_flags),
    "torch's anomaly detection": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "torch's denormal numbers": (_flushes_denormals, torch.set_flush_denormal),
    "functions of torch.nn.functional": (_functional, _set_functional),
}


def _differs(now: Any, kept: Any) -> bool:
    try:
        return bool(now != kept)
    except Exception:  # something else has been put there: a tensor, in place of a function
        return True


class Settings:
    """All of them as they are now."""

    def __init__(self) -> None:
        self._kept = {name: get() for name, (get, _) in SETTINGS.items()}

    def changed(self) -> list[str]:
        """Names of those that differ now."""
        return [name for name, value in self._kept.items() if _differs(SETTINGS[name][0](), value)]

    def restore(self) -> list[str]:
        """Put back what differs; names of what could not be."""
        for name in self.changed():
            with contextlib.suppress(Exception):
                SETTINGS[name][1](self._kept[name])
        return self.changed()
