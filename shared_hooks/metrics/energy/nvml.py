"""NVIDIA's management library: total energy counters (Volta and later), or power sampled, of whole GPUs.

The counter (nvmlDeviceGetTotalEnergyConsumption, millijoules) and the power (nvmlDeviceGetPowerUsage, milliwatts) step
about every 100 ms. On a Jetson the library loads but answers "not supported"; there it is not asked at all.
"""

from __future__ import annotations

import importlib
from typing import Any

from shared_hooks.metrics.energy.meter import Absent, Gpu, Integrated, Machine, Meter, MeterUnavailable, Scope

PERIOD_S = 0.1


class NvmlCounter:
    """The energy counter of one GPU."""

    scope: Scope = "gpu"
    period_s = PERIOD_S

    def __init__(self, nvml: Any, handle: Any, index: int, unit: str) -> None:
        self.name = f"NVML GPU {index}"
        self.domain = f"GPU {index}"
        self.unit = unit
        self._nvml = nvml
        self._handle = handle
        self.read()

    def read(self) -> float:
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3
        except self._nvml.NVMLError as error:
            raise MeterUnavailable(f"{self.name}: {error}") from error


def find(machine: Machine) -> list[Meter]:
    """One meter a GPU; GPUs that answer neither question are left out, and none at all is an error."""
    nvml = load(machine)
    found: list[Meter] = []
    reasons: list[str] = []
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        raise MeterUnavailable(f"{error}") from error
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            found.append(_meter(nvml, handle, index, _text(nvml.nvmlDeviceGetUUID(handle)), machine))
        except nvml.NVMLError as error:
            reasons.append(f"GPU {index}: {error}")
        except MeterUnavailable as error:
            reasons.append(str(error))
    if not found:
        raise MeterUnavailable("; ".join(dict.fromkeys(reasons)) or "no GPU")
    return found


def load(machine: Machine) -> Any:
    """The library, initialised. Raises MeterUnavailable."""
    if machine.is_jetson:
        raise Absent("not asked on a Jetson")
    nvml = machine.nvml
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError as error:
            raise Absent("nvidia-ml-py is not installed") from error
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        # no NVIDIA driver means no NVIDIA GPU that could run anything
        absent = error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
        raise (Absent if absent else MeterUnavailable)(str(error)) from error
    return nvml


class NvmlUtilisation:
    """Per cent of time in which the GPU ran kernels, as the driver last averaged it. Raises MeterUnavailable."""

    name = "NVML GPU utilisation"
    period_s = PERIOD_S

    def __init__(self, machine: Machine, gpu: Gpu) -> None:
        self._nvml = load(machine)
        try:
            self._handle = (
                self._nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                if gpu.uuid
                else self._nvml.nvmlDeviceGetHandleByIndex(gpu.index)
            )
        except self._nvml.NVMLError as error:
            raise MeterUnavailable(f"{self.name}: {error}") from error
        self.read()

    def read(self) -> float:
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        except self._nvml.NVMLError as error:
            raise MeterUnavailable(f"{self.name}: {error}") from error


def _meter(nvml: Any, handle: Any, index: int, unit: str, machine: Machine) -> Meter:
    try:
        counter: Meter = NvmlCounter(nvml, handle, index, unit)
        return counter
    except MeterUnavailable:
        pass

    def watts() -> float:
        try:
            return float(nvml.nvmlDeviceGetPowerUsage(handle)) / 1e3
        except nvml.NVMLError as error:
            raise MeterUnavailable(f"NVML GPU {index}: {error}") from error

    meter = Integrated(
        f"NVML GPU {index} power", f"GPU {index}", "gpu", watts, period_s=PERIOD_S, unit=unit, now=machine.now
    )
    meter.read()
    return meter


def _text(value: Any) -> str:
    """Older bindings answer in bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
