"""GPUs that only the zeus library knows (AMD's, by amdsmi), where it is installed: ``pip install "isthmus[zeus]"``.

``zeus.device.get_gpus()`` gives the GPUs that this process may use, in torch's order;
``get_total_energy_consumption(index)`` is in millijoules.
"""

from __future__ import annotations

import importlib
from typing import Any

from shared_hooks.metrics.energy.meter import Absent, Machine, Meter, MeterUnavailable, Scope


class ZeusMeter:
    """The energy counter of one GPU."""

    scope: Scope = "gpu"
    period_s = 0.1

    def __init__(self, gpus: Any, index: int) -> None:
        self.name = f"zeus GPU {index}"
        self.domain = f"GPU {index}"
        self.unit = str(index)
        self._gpus = gpus
        self._index = index
        self.read()

    def read(self) -> float:
        try:
            return float(self._gpus.get_total_energy_consumption(self._index)) / 1e3
        except Exception as error:  # each vendor's library has errors of its own
            raise MeterUnavailable(f"{self.name}: {error}") from error


def find(machine: Machine) -> list[Meter]:
    """One meter a GPU that counts its energy."""
    try:
        zeus = importlib.import_module("zeus.device") if machine.zeus is None else machine.zeus
    except ImportError as error:
        raise Absent("not installed") from error
    if machine.is_jetson:
        raise Absent("not asked on a Jetson")
    try:
        gpus = zeus.get_gpus()
        count = len(gpus)
        counting = [index for index in range(count) if gpus.supports_get_total_energy_consumption(index)]
    except Exception as error:
        raise MeterUnavailable(str(error)[:100] or type(error).__name__) from error
    if not count:
        raise Absent("no GPU")
    if not counting:
        raise MeterUnavailable("no GPU that counts its energy")
    return [ZeusMeter(gpus, index) for index in counting]
