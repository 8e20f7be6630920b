"""A process held to a share of one core, as if it were a slower machine.

The kernel's bandwidth control (cgroup v1: cpu.cfs_quota_us, v2: cpu.max) lets a group run for a quota in every period.
It notices that a quota is used up only at a tick or a context switch, and with ticks of 4 ms a quarter of a core
becomes 4 ms at full speed and then 12 ms of nothing: work of 3 ms is sometimes not slowed at all. A *metronome* of
real-time priority therefore wakes on the same core every 0.2 ms, which makes the kernel look: measured here, a busy
loop then runs 1.3 ms and pauses 2.7 ms, over and over. It takes a few per cent of the core and nothing of the quota.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

PERIOD_US, METRONOME_SECONDS = 4000, 0.0002
SHARES, WEIGHT = 100_000, 5_000  # v1, v2: far above the default, so that neighbours hardly count
METRONOME = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
pause, sleep = float(sys.argv[2]), time.sleep
while os.getppid() == int(sys.argv[3]):
    for _ in range(1000):
        sleep(pause)
"""


@dataclass(frozen=True)
class Controller:
    """Where groups are made, and by which version's rules."""

    root: Path
    version: int

    def limit(self, group: Path, share: float | None) -> None:
        """Let ``group`` run for ``share`` of one core (None: all it gets)."""
        quota = None if share is None else round(share * PERIOD_US)
        if self.version == 2:
            (group / "cpu.max").write_text(f"{'max' if quota is None else quota} {PERIOD_US}")
            (group / "cpu.weight").write_text(str(WEIGHT))
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(-1 if quota is None else quota))
            (group / "cpu.shares").write_text(str(SHARES))


def find() -> Controller | None:
    """The cpu controller that can be written to, v1 before v2."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    for _, where, kind, options, *_ in mounts:
        root = Path(where)
        if kind == "cgroup" and "cpu" in options.split(",") and os.access(root, os.W_OK):
            return Controller(root, 1)
    for _, where, kind, *_ in mounts:
        root = Path(where)
        if kind == "cgroup2" and os.access(root, os.W_OK) and "cpu" in _words(root / "cgroup.controllers"):
            with contextlib.suppress(OSError):
                (root / "cgroup.subtree_control").write_text("+cpu")
            if "cpu" in _words(root / "cgroup.subtree_control"):
                return Controller(root, 2)
    return None


class Core:
    """One core for one side: ``with Core("edge", 0, 0.25) as core: core.hold(pid)``.

    ``share`` of the core, None for all of it. At the end the group's processes are let go, and the group is removed;
    one that an earlier crash left behind is taken over.
    """

    def __init__(self, name: str, number: int, share: float | None = None) -> None:
        self.number, self.share = number, share
        controller = find()
        if controller is None:
            raise OSError("no cpu controller that may be written to")
        self._controller = controller
        self._group = controller.root / f"isthmus-experiment-{name}"
        self._metronome: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Core:
        self._group.mkdir(exist_ok=True)
        try:
            self._controller.limit(self._group, self.share)
            if self.share is not None:
                words = [str(self.number), str(METRONOME_SECONDS), str(os.getpid())]
                self._metronome = subprocess.Popen([sys.executable, "-S", "-c", METRONOME, *words])
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def hold(self, pid: int) -> None:
        """Take a process in, with all its threads: its core, its share."""
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), {self.number})
        (self._group / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Let everything go; may be repeated."""
        if self._metronome is not None:
            self._metronome.kill()
            self._metronome.wait()
            self._metronome = None
        for _ in range(100):
            if not self._group.exists():
                return
            for pid in _words(self._group / "cgroup.procs"):
                with contextlib.suppress(OSError):
                    (self._controller.root / "cgroup.procs").write_text(pid)
            with contextlib.suppress(OSError):
                self._group.rmdir()
                return
            time.sleep(0.02)


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split()
    except OSError:
        return []
