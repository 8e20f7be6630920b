"""Energy from the machine's own meters: one small interface (`Meter`), one function a backend, no invented numbers.

meter         `Meter`, and the machine that it reads
boards   the backends

To add a backend, write a function ``find(machine: Machine) -> list[Meter]`` that raises
`MeterUnavailable` with a few words when there is nothing, and name it in `BACKENDS`; see docs/energy.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shared_hooks.metrics.energy import boards
from shared_hooks.metrics.energy.meter import Absent, Gpu, Integrated, Machine, Meter, MeterUnavailable, Scope

__all__ = [
    "BACKENDS",
    "Absent",
    "Gpu",
    "Integrated",
    "Machine",
    "Meter",
    "MeterUnavailable",
    "Meters",
    "Scope",
    "find_meters",
]

BACKENDS: tuple[tuple[str, Callable[[Machine], list[Meter]]], ...] = (
    ("NVML", boards.find_nvml),
    ("RAPL", boards.find_rapl),
    ("INA3221", boards.find_ina3221),
    ("vcgencmd", boards.find_vcgencmd),
    ("zeus", boards.find_zeus),
)
"""Asked in this order; of two meters for one GPU the first counts."""


@dataclass(frozen=True)
class Meters:
    """What was found on a machine, and why the other backends found nothing."""

    found: tuple[Meter, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()
    """(backend, reason) of those that should have found something: no permission, not supported, broken."""
    absent: tuple[tuple[str, str], ...] = ()
    """The same of those that measure what this machine does not have."""

    def total(self, gpu: Gpu | None = None) -> tuple[Meter, ...]:
        """The meters to add up for a model that runs on ``gpu``, or on the processor: no two see the same thing.

        A board's meter sees everything and counts alone. Else the packages, their memories, and the one GPU. What the
        model runs on must be seen: without it, MeterUnavailable says why there is no total.
        """
        boards = [meter for meter in self.found if meter.scope == "board"]
        if boards:
            return tuple(boards[:1])
        processor = [meter for meter in self.found if meter.scope in ("package", "memory")]
        if gpu is None:
            if not processor:
                raise MeterUnavailable(self._why())
            return tuple(processor)
        units = {gpu.uuid or str(gpu.index), str(gpu.index)}
        own = [meter for meter in self.found if meter.scope == "gpu" and (meter.unit in units or _same(meter, gpu))]
        if not own:
            raise MeterUnavailable(self._why())
        return (*processor, own[0])

    def _why(self) -> str:
        if self.missing:
            return "no energy meter: " + "; ".join(f"{name}: {why}" for name, why in self.missing)
        return "no energy meter" + (f" among {', '.join(name for name, _ in self.absent)}" if self.absent else "")


def _same(meter: Meter, gpu: Gpu) -> bool:
    """Where torch does not tell the UUID, its index is the driver's only if nothing was hidden from it."""
    return not gpu.uuid and "CUDA_VISIBLE_DEVICES" not in os.environ and meter.domain == f"GPU {gpu.index}"


def find_meters(root: Path = Path("/"), machine: Machine | None = None) -> Meters:
    """Ask every backend. Takes as long as drivers take to load: not for the path of a request.

    ``machine``: with another way to read files, run commands or reach libraries; ``root`` is then not looked at.
    """
    machine = machine or Machine(root)
    found: list[Meter] = []
    missing: list[tuple[str, str]] = []
    absent: list[tuple[str, str]] = []
    for name, find in BACKENDS:
        try:
            found += find(machine)
        except Absent as error:
            absent.append((name, str(error)))
        except MeterUnavailable as error:
            missing.append((name, str(error)))
        except Exception as error:  # a backend that breaks costs its own meters and nothing else
            missing.append((name, f"{type(error).__name__}: {error}"[:200]))
    return Meters(tuple(found), tuple(missing), tuple(absent))
