"""Memory, descriptors and threads of processes, read again and again while requests are counted."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import psutil

MIB = 1 << 20
WHAT = ("MiB", "descriptors", "threads")


class Watch:
    """``processes``: ids by name; their children count with them, each process of the family under a name of its own.
    ``count``: requests until now.
    """

    def __init__(self, processes: dict[str, int], count: Callable[[], int], every: float) -> None:
        self._processes = processes
        self._count = count
        self._every = every
        self._over = threading.Event()
        self.looks: dict[tuple[str, str], list[tuple[float, float]]] = {}
        """(process, what) -> (requests, reading)."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(self._every):
            self.look()

    def look(self) -> None:
        """One reading of everything."""
        count = self._count()
        for name, pid in self._processes.items():
            with contextlib.suppress(psutil.Error):
                own = psutil.Process(pid)
                for number, process in enumerate([own, *own.children(recursive=True)]):
                    one = name if not number else f"{name} {number}"
                    readings = (process.memory_info().rss / MIB, process.num_fds(), process.num_threads())
                    for what, reading in zip(WHAT, readings, strict=True):
                        self.looks.setdefault((one, what), []).append((count, reading))

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        self.look()
