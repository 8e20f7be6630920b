"""Define an energy meter, and the view of a machine that backends search for meters."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from shared_hooks.errors import IsthmusError

Scope = Literal["board", "package", "memory", "gpu", "part"]
"""What a meter measures: the whole computer; one processor package; the memory beside a package, which the package's
meter does not include; a GPU; or a part of what another meter measures. `Meters.total` adds up by it.
"""


class MeterUnavailable(IsthmusError):
    """There is no such meter, or it stopped responding; the message gives the reason."""


class Absent(MeterUnavailable):
    """This machine does not have the hardware, so nothing needs mending."""


class Meter(Protocol):
    """Measures the energy of one domain. Used by one thread only."""

    name: str
    """Name of the backend and the domain: "RAPL package-0"."""
    domain: str
    """The domain's name in the kernel or the driver: "package-0", "GPU 0", "VDD_IN"."""
    scope: Scope
    period_s: float
    """Seconds between useful readings: a counter that steps every 100 ms is not worth reading more often."""
    unit: str
    """The GPU it measures: its UUID, or its index where the backend knows no UUIDs; else empty."""

    def read(self) -> float:
        """Return joules since some fixed moment; never decreases. Raises MeterUnavailable."""


@dataclass(frozen=True)
class Gpu:
    """A GPU: torch's index, and the UUID as the driver prints it ("GPU-..."), empty if unknown."""

    index: int
    uuid: str = ""


class Integrated:
    """A meter that integrates power over time, by the trapezoid rule between two readings."""

    def __init__(
        self,
        name: str,
        domain: str,
        scope: Scope,
        watts: Callable[[], float],
        *,
        period_s: float,
        unit: str = "",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.domain = domain
        self.scope: Scope = scope
        self.period_s = period_s
        self.unit = unit
        self._watts = watts
        self._now = now
        self._last: tuple[float, float] | None = None
        self._joules = 0.0

    def read(self) -> float:
        watts = self._watts()
        now = self._now()
        if self._last is not None:
            before, then = self._last
            self._joules += (watts + before) / 2 * max(0.0, now - then)
        self._last = (watts, now)
        return self._joules


def read_text(path: Path) -> str:
    """Read a small file of the kernel's. Raises OSError."""
    return path.read_text(encoding="utf-8", errors="replace")


def run_command(command: Sequence[str]) -> str:
    """Return a command's output. Raises OSError if it does not exist, and subprocess.SubprocessError if it fails."""
    found = shutil.which(command[0])
    if found is None:
        raise FileNotFoundError(2, "not installed", command[0])
    return subprocess.run([found, *command[1:]], capture_output=True, text=True, timeout=2, check=True).stdout


@dataclass(frozen=True)
class Machine:
    """This machine, or a recorded one: where its files are, how they are read, and how libraries are loaded."""

    root: Path = Path("/")
    read: Callable[[Path], str] = read_text
    run: Callable[[Sequence[str]], str] = run_command
    nvml: Any = None
    """A module like pynvml; None: pynvml itself."""
    zeus: Any = None
    """A module like zeus.device; None: zeus.device itself, if installed."""
    now: Callable[[], float] = time.monotonic

    def path(self, *parts: str) -> Path:
        return self.root.joinpath(*parts)

    def text(self, path: Path) -> str:
        """Return a file's text, stripped. Raises MeterUnavailable that names the file and the reason."""
        try:
            return self.read(path).strip().strip("\0")
        except OSError as error:
            shown = f"/{path.relative_to(self.root)}"
            if isinstance(error, PermissionError):
                raise MeterUnavailable(f"no permission to read {shown}") from error
            raise MeterUnavailable(f"{shown}: {error.strerror or type(error).__name__}") from error

    def number(self, path: Path) -> float:
        """Return the non-negative number in a file. Raises MeterUnavailable."""
        text = self.text(path)
        try:
            value = int(text)
        except ValueError:
            value = -1
        if value < 0:
            raise MeterUnavailable(f"/{path.relative_to(self.root)} holds {text[:20]!r}, not a number")
        return value

    @property
    def board(self) -> str:
        """The board's name in the device tree; empty without one."""
        for path in ("proc/device-tree/model", "sys/firmware/devicetree/base/model"):
            try:
                return self.text(self.path(path))
            except MeterUnavailable:
                continue
        return ""

    @property
    def is_jetson(self) -> bool:
        """Whether this is NVIDIA's Tegra, where NVML answers "not supported" to most queries and the rest is
        unreliable.
        """
        if self.path("etc/nv_tegra_release").exists():
            return True
        for path in ("proc/device-tree/compatible", "sys/firmware/devicetree/base/compatible"):
            try:
                return "nvidia,tegra" in self.text(self.path(path))
            except MeterUnavailable:
                continue
        return False
