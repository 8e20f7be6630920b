"""What an energy meter is, and what a machine shows of itself to the backends that look for meters."""

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
"""What a meter sees: the whole computer; one processor package; the memory beside a package, which the package's meter
does not see; a GPU; or a part of what another meter sees. `Meters.total` adds up by it.
"""


class MeterUnavailable(IsthmusError):
    """There is no such meter here, or it has stopped answering; the message is a few words that say why."""


class Absent(MeterUnavailable):
    """This machine has nothing of the kind: nothing that somebody might want to mend."""


class Meter(Protocol):
    """Counts the energy of one domain. Read by one thread only."""

    name: str
    """The name of the backend and the domain: "RAPL package-0"."""
    domain: str
    """As the kernel or the driver names it: "package-0", "GPU 0", "VDD_IN"."""
    scope: Scope
    period_s: float
    """How often it is worth reading: a counter that steps every 100 ms says nothing in between."""
    unit: str
    """Which GPU: its UUID, or its index where the backend knows no UUIDs; else empty."""

    def read(self) -> float:
        """Joules since some moment, never less than at the last call. Raises MeterUnavailable."""


@dataclass(frozen=True)
class Gpu:
    """The GPU a model runs on: torch's index, and the UUID as the driver prints it ("GPU-..."), empty if unknown."""

    index: int
    uuid: str = ""


class Integrated:
    """A meter out of watts: power times time, by the trapezoid between two readings."""

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
    """A small file of the kernel's. Raises OSError."""
    return path.read_text(encoding="utf-8", errors="replace")


def run_command(command: Sequence[str]) -> str:
    """What a command prints. Raises OSError when it is not there, and subprocess.SubprocessError when it fails."""
    found = shutil.which(command[0])
    if found is None:
        raise FileNotFoundError(2, "not installed", command[0])
    return subprocess.run([found, *command[1:]], capture_output=True, text=True, timeout=2, check=True).stdout


@dataclass(frozen=True)
class Machine:
    """This machine, or a recorded one: where its files are, how they are read, and what else backends ask."""

    root: Path = Path("/")
    read: Callable[[Path], str] = read_text
    run: Callable[[Sequence[str]], str] = run_command
    nvml: Any = None
    """A module like pynvml; None = pynvml itself."""
    zeus: Any = None
    """A module like zeus.device; None = zeus.device itself, where it is installed."""
    now: Callable[[], float] = time.monotonic

    def path(self, *parts: str) -> Path:
        return self.root.joinpath(*parts)

    def text(self, path: Path) -> str:
        """A file without white space around it; MeterUnavailable names the file and what is in the way."""
        try:
            return self.read(path).strip().strip("\0")
        except OSError as error:
            shown = f"/{path.relative_to(self.root)}"
            if isinstance(error, PermissionError):
                raise MeterUnavailable(f"no permission to read {shown}") from error
            raise MeterUnavailable(f"{shown}: {error.strerror or type(error).__name__}") from error

    def number(self, path: Path) -> float:
        """The same for a number that is not negative."""
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
        """What the device tree calls the board; empty without one."""
        for path in ("proc/device-tree/model", "sys/firmware/devicetree/base/model"):
            try:
                return self.text(self.path(path))
            except MeterUnavailable:
                continue
        return ""

    @property
    def is_jetson(self) -> bool:
        """NVIDIA's Tegra, where NVML answers "not supported" to what matters and is not to be believed otherwise."""
        if self.path("etc/nv_tegra_release").exists():
            return True
        for path in ("proc/device-tree/compatible", "sys/firmware/devicetree/base/compatible"):
            try:
                return "nvidia,tegra" in self.text(self.path(path))
            except MeterUnavailable:
                continue
        return False
