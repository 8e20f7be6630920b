"""Describe a machine, as far as it affects how long a model takes.

Sources: /proc and /sys as the kernel documents them (cpufreq, cgroup v1 and v2, device tree, DMI), Jetson's
/etc/nv_tegra_release and nvpmodel state. The machine's own identifiers go into a hash and are never shown.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

import torch

from shared_hooks import devices
from shared_hooks.profiling.timers import Inputs
from shared_hooks.version import __version__
from shared_hooks.wrapped import WrappedModel

_SERIALS = ("etc/machine-id", "proc/device-tree/serial-number")


def describe(device: torch.device | str, root: Path = Path("/")) -> dict[str, Any]:
    """Describe this machine as JSON data.

    ``id``: a hash, stable for this machine, its processor and ``device``. ``cpu_quota``: the cgroup's limit in
    processors (0.25 = a quarter core); ``cores_usable``: those this process may run on; ``cpu_mhz``: the limits in
    force; ``memory_bytes``: of the machine. What cannot be read is None. ``root``: where its /etc, /proc and /sys are.
    """
    device = torch.device(device)
    cpu, cores = processor(root)
    board = _board(root)
    gpus = [_gpu(torch.device(one, at)) for one in devices.kinds() if one != "cpu" for at in range(devices.count(one))]
    serials = [text for text in (_text(root / name) for name in _SERIALS) if text]
    used = device.type if devices.is_host(device) else devices.name_of(device)
    names = serials or [platform.node()]
    return {
        "id": hashlib.blake2b(
            "\n".join([*names, cpu or "", used]).encode(), digest_size=8, person=b"isthmus"
        ).hexdigest(),
        "id_from": "serial numbers" if serials else "host name",
        "name": platform.node() or "unnamed",
        "board": board,
        "cpu": cpu,
        "cores": cores,
        "cores_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu_mhz": _frequencies(root),
        "cpu_quota": cpu_quota(root),
        "power_mode": _text(root / "var/lib/nvpmodel/status"),
        "memory_bytes": _memory(root),
        "gpus": gpus,
        "os": _os(root),
        "kernel": platform.release(),
        "arch": platform.machine(),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "isthmus": __version__,
    }


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the smallest limit of this process's cgroup and those above it, in processors; None without one."""
    limits = [limit for folder in _cgroups(root) if (limit := _limit(folder)) is not None]
    return min(limits, default=None)


def _cgroups(root: Path) -> Iterator[Path]:
    """Yield folders that may hold a limit: this process's group in every hierarchy, its ancestors, and the mount
    itself.
    """
    mount = root / "sys/fs/cgroup"
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        tops = [mount / controllers, mount / "cpu"] if controllers else [mount, mount / "unified"]
        group = PurePosixPath(*(part for part in PurePosixPath(path).parts if part not in ("/", "..")))
        for top in tops:
            for folder in (group, *group.parents):
                yield top / folder


def _limit(folder: Path) -> float | None:
    both = _text(folder / "cpu.max")  # v2: "25000 100000" or "max 100000"
    quota, period = both.split()[:2] if both and len(both.split()) >= 2 else (None, None)
    if quota is None:
        quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")  # v1: -1 = none
    try:
        return int(quota) / int(period) if quota and period and int(quota) > 0 and int(period) > 0 else None
    except ValueError:
        return None


def processor(root: Path = Path("/")) -> tuple[str | None, int | None]:
    """Return model and number of processors from /proc/cpuinfo; ARM has part numbers instead of a name."""
    text = _text(root / "proc/cpuinfo") or ""
    cores = len(re.findall(r"^processor\s*:", text, re.MULTILINE)) or None
    for key in ("model name", "cpu model", "Processor"):
        if found := re.search(rf"^{key}\s*:\s*(.+)$", text, re.MULTILINE):
            return found.group(1).strip(), cores
    maker = re.search(r"^CPU implementer\s*:\s*(\S+)", text, re.MULTILINE)
    parts = sorted(set(re.findall(r"^CPU part\s*:\s*(\S+)", text, re.MULTILINE)))
    return (f"implementer {maker.group(1)}, part {' and '.join(parts)}" if maker and parts else None), cores


def _board(root: Path) -> str | None:
    dmi = root / "sys/class/dmi/id"
    named = [text for name in ("board_vendor", "product_name") if (text := _text(dmi / name))]
    return _text(root / "proc/device-tree/model") or " ".join(named) or None


def _frequencies(root: Path) -> dict[str, float] | None:
    """Return the lowest and highest limit in force over all processors."""
    folders = sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq"))
    limits = [
        [int(text) / 1000 for folder in folders if (text := _text(folder / name)) and text.isdecimal()]
        for name in ("scaling_min_freq", "scaling_max_freq")
    ]
    return {"min": min(limits[0]), "max": max(limits[1])} if all(limits) else None


def _memory(root: Path) -> int | None:
    found = re.search(r"^MemTotal:\s*(\d+) kB", _text(root / "proc/meminfo") or "", re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None


def _os(root: Path) -> str | None:
    found = re.search(r'^PRETTY_NAME="?([^"\n]*)', _text(root / "etc/os-release") or "", re.MULTILINE)
    tegra = re.match(r"# (R\d+)[^,]*, REVISION: ([\d.]+)", _text(root / "etc/nv_tegra_release") or "")
    parts = [found.group(1) if found else platform.system(), f"L4T {tegra.group(1)}.{tegra.group(2)}" if tegra else ""]
    return ", ".join(part for part in parts if part) or None


def _gpu(device: torch.device) -> dict[str, Any]:
    about = devices.properties(device)
    memory, major, minor = (getattr(about, name, None) for name in ("total_memory", "major", "minor"))
    capability = None if major is None else f"{major}.{minor}"
    return {"name": devices.name_of(device), "memory_bytes": memory, "capability": capability}


def _text(path: Path) -> str | None:
    """Return a small file's text; None if absent, unreadable or empty. Device-tree strings end with a zero byte."""
    try:
        return path.read_bytes()[:65536].decode("utf-8", "replace").replace("\0", "").strip() or None
    except OSError:
        return None


# What two machines must have in common for a model to give the same bits on both: release of torch, device,
# processor, threads. Part of the greeting; a difference is no reason to refuse.


def kind(device: torch.device) -> dict[str, str]:
    """Return ``torch``, ``kind`` ("cpu", "cuda NVIDIA H100"), ``processor`` with the vector unit in use,
    ``threads``.
    """
    return {
        "torch": str(torch.__version__),
        "kind": device.type if devices.is_host(device) else f"{device.type} {devices.name_of(device)}",
        "processor": _processor(),
        "threads": str(torch.get_num_threads()),
    }


def unlike(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return the differences that may change result bits, in words. A value that a side omits counts as equal.

    A GPU's kernels are its own, whatever the processor beside it.
    """
    names = ("torch", "kind", "processor", "threads") if mine["kind"] == "cpu" else ("torch", "kind")
    differ = [name for name in names if theirs.get(name, mine[name]) != mine[name]]
    return [f"{name} {mine[name]} here, {theirs[name]} there" for name in differ]


@functools.cache
def _processor() -> str:
    unit = torch.backends.cpu.get_cpu_capability()
    return f"{processor()[0] or platform.machine()}, {unit}"


# Whether several threads of torch cost more than they gain here: forwards with all of them and with one, compared.
#
# torch's threads wait for each other by spinning. Where another program uses the processor, one of them is preempted,
# and the others spin until it is back: beside one or two busy processes on two cores, forwards with two threads took
# 10 to 100 times as long as with one. Clocks and counters cannot tell this from a slow model; so one thread is tried.


TRIES: Final = 5
LEAST: Final = 3
"""Minimum number of forwards."""
FACTOR: Final = 2.0
"""Slowdown against one thread, by medians, from which a warning is shown."""
WORTH: Final = 1.15
"""Speedup from which another number of threads is chosen."""


def times_of_threads(
    wrapped: WrappedModel, inputs: Inputs, counts: Sequence[int], pause: float, seconds: float
) -> dict[int, float]:
    """Return milliseconds of a whole forward by torch's number of threads: the median of `TRIES` forwards with each,
    fewer if they take more than ``seconds``. ``pause``: seconds before each, as before every measurement.
    """
    threads = torch.get_num_threads()
    took: dict[int, list[int]] = {count: [] for count in counts}
    until = time.monotonic() + seconds
    while len(took[counts[-1]]) < (TRIES if time.monotonic() < until else LEAST):
        for count, spent in took.items():
            args, kwargs = inputs.fresh()
            time.sleep(pause)
            torch.set_num_threads(count)
            try:
                started = time.perf_counter_ns()
                with torch.no_grad():  # not through `WrappedModel`, which would plan again for other settings
                    wrapped.model(*args, **kwargs)
                spent.append(time.perf_counter_ns() - started)
            finally:
                torch.set_num_threads(threads)
    return {count: statistics.median(spent) / 1e6 for count, spent in took.items()}


def warnings_of_threads(wrapped: WrappedModel, inputs: Inputs, pause: float, seconds: float) -> tuple[str, ...]:
    """Return a warning if one thread is much faster, else nothing.

    For the edge only: the number of threads belongs to the whole process, and a server's other requests need it.
    """
    threads = torch.get_num_threads()
    if threads == 1 or inputs.device.type != "cpu":
        return ()
    several, one = times_of_threads(wrapped, inputs, (threads, 1), pause, seconds).values()
    if several < FACTOR * one:
        return ()
    return (
        f"{threads} threads take {several:.1f} ms for a forward, one takes {one:.1f} ms (torch's threads wait by "
        "spinning, and something else may run on the processor): give --threads 1, in Python ModelChoice(..., "
        "threads=1), on both sides; or set OMP_WAIT_POLICY=passive",
    )


def fastest_threads(wrapped: WrappedModel, inputs: Inputs, seconds: float) -> tuple[int, dict[int, float]]:
    """Return the number of torch's threads to use, and milliseconds of a forward by the numbers tried.

    The current number is kept unless half of it, or one, is faster by `WORTH`.
    """
    threads = torch.get_num_threads()
    if threads == 1 or inputs.device.type != "cpu":
        return threads, {}
    counts = sorted({threads, max(1, threads // 2), 1}, reverse=True)
    took = times_of_threads(wrapped, inputs, counts, 0.0, seconds)
    best = min(counts, key=lambda count: took[count])
    return (best if WORTH * took[best] < took[threads] else threads), took
