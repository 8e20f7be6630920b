"""This machine: versions, processor, memory, energy sensors, clock.

Sources: /proc and /sys (cpufreq), adjtimex(2).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from shared_hooks.doctor.finding import Finding, ok, warning
from shared_hooks.metrics.energy import find_meters
from shared_hooks.version import __version__

GIB: Final = 1 << 30
PACKAGES: Final = ("isthmus", "torch", "grpcio", "protobuf", "numpy")
TIME_ERROR: Final = 5
"""A state of adjtimex(2): the clock is not synchronised."""
STEADY: Final = ("performance", "schedutil", "ondemand")
OWN: Final = ("intel_pstate", "amd-pstate-epp")
"""Drivers whose "powersave" raises the frequency with the load all the same."""


def versions(protocol: int) -> Finding:
    """Versions of everything that decides whether both sides agree."""
    found = [f"{name} {_version(name)}" for name in PACKAGES]
    return ok("versions", ", ".join([*found, f"protocol {protocol}"]))


def processor(about: dict[str, Any], threads: int, root: Path = Path("/")) -> Iterator[Finding]:
    """``about``: `shared_hooks.profiling.machine.describe`; ``threads``: within one operation."""
    cores, quota = about["cores_usable"] or 1, about["cpu_quota"]
    may = cores if quota is None else min(cores, quota)
    shown = f"{about['cpu'] or 'processor unknown'}, {cores} cores"
    shown += "" if quota is None else f", of whose time a control group allows {quota:g}"
    if threads > may:
        yield warning(
            "processor", f"{shown}; {threads} threads", f"--threads {max(1, int(may))}: more wait for each other"
        )
    else:
        yield ok("processor", f"{shown}; {threads} thread{'s' if threads > 1 else ''}")
    yield from _governor(root)


def _governor(root: Path) -> Iterator[Finding]:
    folders = sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq"))
    governors = sorted({text for folder in folders if (text := _text(folder / "scaling_governor"))})
    if not governors:
        yield ok("frequency", "the machine does not tell how it sets the processor's (a virtual one?)")
        return
    driver = _text(folders[0] / "scaling_driver")
    if set(governors) <= set(STEADY) or driver in OWN:
        yield ok("frequency", f"governor {', '.join(governors)}" + (f", driver {driver}" if driver else ""))
        return
    yield warning("frequency", f"governor {', '.join(governors)}", "cpupower frequency-set -g performance: else slow")


def memory(needed: int, what: str) -> Iterator[Finding]:
    """Whether the machine has the bytes that ``what`` may take."""
    import psutil

    found = psutil.virtual_memory()
    has = f"{found.total / GIB:.1f} GiB, {found.available / GIB:.1f} of them free"
    if needed > found.total:
        yield warning("memory", f"{has}; {what} may take {needed / GIB:.1f} GiB", "lower them, or add memory")
    else:
        yield ok("memory", f"{has}; {what} may take {needed / GIB:.1f} GiB" if needed else has)


def sensors() -> Iterator[Finding]:
    """Energy meters: which can be read, and which cannot and why."""
    meters = find_meters()
    for meter in meters.found:
        yield ok("energy", f"{meter.name} ({meter.scope}) can be read")
    for name, why in meters.missing:
        yield warning("energy", f"{name}: {why}", "docs/energy.md says what each needs; energy is then unavailable")
    if not meters.found and not meters.missing:
        names = ", ".join(name for name, _ in meters.absent)
        yield ok("energy", f"this machine has no sensor that is known here ({names}); energy is unavailable")


def clock() -> Iterator[Finding]:
    """Whether anything sets it: certificates and tokens begin and end by it; durations are not measured with it."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(1024))  # asks, and sets nothing
    except (OSError, AttributeError):
        state = -1
    if state == TIME_ERROR:
        yield warning("clock", f"{now}; the kernel says that nothing sets it", "start chrony or systemd-timesyncd")
    else:
        yield ok("clock", now if state < 0 else f"{now}, set by the network")


def _version(name: str) -> str:
    try:
        return __version__ if name == "isthmus" else metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None
