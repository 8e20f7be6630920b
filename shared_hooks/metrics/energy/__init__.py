"""Measure energy with the machine's own meters: a small interface (`Meter`) and one function per backend.

meter    `Meter`, and the machine that it reads
boards   the backends

To add a backend, write a function ``find(machine: Machine) -> list[Meter]`` that raises `MeterUnavailable` with a short
reason if it finds nothing, and add it to `BACKENDS`; see docs/energy.md.
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
"""Backends in order; the first meter found for a GPU is used."""


@dataclass(frozen=True)
class Meters:
    """The meters found on a machine, and why the other backends found none."""

    found: tuple[Meter, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()
    """(backend, reason) of meters that should exist: no permission, not supported, broken."""
    absent: tuple[tuple[str, str], ...] = ()
    """(backend, reason) of backends whose hardware this machine does not have."""

    def total(self, gpu: Gpu | None = None) -> tuple[Meter, ...]:
        """Return the meters to add up for a model on ``gpu``, or on the processor. No two of them measure the same
        thing.

        A board's meter covers everything and is used alone. Otherwise: the packages, their memories, and the one GPU.
        Raises MeterUnavailable with the reason if the device that the model runs on has no meter.
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
    """Return whether a meter belongs to ``gpu``. Without a UUID from torch, its index is the driver's only if
    CUDA_VISIBLE_DEVICES hides nothing.
    """
    return not gpu.uuid and "CUDA_VISIBLE_DEVICES" not in os.environ and meter.domain == f"GPU {gpu.index}"


def find_meters(root: Path = Path("/"), machine: Machine | None = None) -> Meters:
    """Run every backend. Takes as long as drivers take to load, so not for the path of a request.

    ``machine``: replaces how files are read, commands run and libraries loaded; ``root`` is then ignored.
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
        except Exception as error:  # a broken backend costs its own meters and nothing else
            missing.append((name, f"{type(error).__name__}: {error}"[:200]))
    return Meters(tuple(found), tuple(missing), tuple(absent))
