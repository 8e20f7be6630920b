"""``python -m studies.exhaustion``: a server whose system refuses threads, processes, files and memory for a while.

Clients ask throughout. While calls of the system fail, each request must be answered rightly or fail by name; after it,
all must be answered again, and SIGTERM must end the server. Exit status 1 where one is not. Each cut has been asked
before: one whose recipe cannot be made for want of memory is refused for a minute.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from studies.benchmarks.processes import listening

CUTS = ("stage2.0.conv2", "stage1.0.conv1", "pool")
REFUSED: dict[str, tuple[tuple[Any, str, Callable[[], Exception]], ...]] = {
    "threads": ((threading.Thread, "start", lambda: RuntimeError("can't start new thread")),),
    "processes": ((subprocess.Popen, "__init__", lambda: OSError(11, "Resource temporarily unavailable")),),
    "files": tuple(
        (os, name, lambda: OSError(24, "Too many open files")) for name in ("open", "dup", "pread", "fstat")
    ),
    "memory": (
        (torch, "empty", lambda: RuntimeError("can't allocate memory")),
        (torch, "frombuffer", MemoryError),
        (json, "loads", MemoryError),
        (json, "dumps", MemoryError),
        (hashlib, "blake2b", MemoryError),
    ),
}
"""Functions that fail, and how."""


def serve(kinds: list[str], share: float, seed: int, words: list[str]) -> int:
    """A cloud server in which a ``share`` of these calls fails from SIGUSR1 to SIGUSR2."""
    chance, failing = random.Random(seed), threading.Event()

    def patch(owner: Any, name: str, error: Callable[[], Exception]) -> None:
        own = getattr(owner, name)

        def maybe(*args: Any, **kwargs: Any) -> Any:
            if failing.is_set() and chance.random() < share:
                raise error()
            return own(*args, **kwargs)

        setattr(owner, name, maybe)

    for kind in kinds:
        for one in REFUSED[kind]:
            patch(*one)
    signal.signal(signal.SIGUSR1, lambda *_: failing.set())
    signal.signal(signal.SIGUSR2, lambda *_: failing.clear())
    from cloud_server.__main__ import main

    return main(words)


class Asking:
    """A client that asks at one cut until `over` is set, again and again on a new connection."""

    def __init__(self, address: str, cut: str, over: threading.Event) -> None:
        self.counts: Counter[str] = Counter()
        self._address, self._cut, self._over = address, cut, over
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        from edge_client import EdgeClient, ModelChoice
        from shared_hooks.errors import IsthmusError

        chance = torch.Generator().manual_seed(CUTS.index(self._cut))
        while not self._over.is_set():
            try:
                with EdgeClient(self._address, ModelChoice("digits", device="cpu", threads=1), self._cut) as client:
                    for _ in range(20):
                        if self._over.is_set():
                            break
                        x = torch.randn(1, 1, 16, 16, generator=chance)
                        wanted = client.wrapped.whole(x)
                        self._count(
                            lambda x=x, wanted=wanted, client=client: torch.equal(client.infer(x).output, wanted)
                        )
            except IsthmusError as error:
                self.counts[f"{type(error).__name__} when connecting"] += 1

    def _count(self, right: Callable[[], bool]) -> None:
        from shared_hooks.errors import IsthmusError

        try:
            self.counts["right" if right() else "WRONG"] += 1
        except IsthmusError as error:
            self.counts[type(error).__name__] += 1


def measure(kinds: list[str], share: float, seconds: float, seed: int, words: list[str]) -> dict[str, dict[str, int]]:
    """Return how requests ended while calls failed, and afterwards."""
    given = ["--serve", json.dumps([kinds, share, seed]), "--listen", "127.0.0.1:0", "--threads", "1", *words]
    found: dict[str, dict[str, int]] = {}
    with listening("studies.exhaustion", *given, "--model", "digits", "--log-level", "error", threads=1) as (
        address,
        pid,
    ):
        over = threading.Event()
        clients = [Asking(address, cut, over) for cut in CUTS]
        _all_answered(clients)
        os.kill(pid, signal.SIGUSR1)
        clients += [Asking(address, cut, over) for cut in CUTS]  # new streams need new threads
        time.sleep(seconds)
        found["while calls failed"] = _counts(clients)
        os.kill(pid, signal.SIGUSR2)
        _all_answered(clients)  # so that what failed meanwhile is behind them
        found["afterwards"] = _counts(clients, seconds)
        over.set()
        for client in clients:
            client.thread.join(90)
        found["clients that hang"] = {"": sum(client.thread.is_alive() for client in clients)}
    return found


def _all_answered(clients: list[Asking]) -> None:
    """Wait until each has had some right answers, for two minutes at most. Counts from nothing."""
    _counts(clients)
    until = time.monotonic() + 120
    while not all(client.counts["right"] > 4 for client in clients) and time.monotonic() < until:
        time.sleep(0.1)


def _counts(clients: list[Asking], seconds: float = 0.0) -> dict[str, int]:
    """Return all counts since the last call; with ``seconds``, those from now on."""
    if seconds:
        _counts(clients)
        time.sleep(seconds)
    found: Counter[str] = Counter()
    for client in clients:
        counts, client.counts = client.counts, Counter()
        found += counts
    return dict(found)


def failures(found: dict[str, dict[str, int]]) -> list[str]:
    """Return what must not be."""
    later = found["afterwards"]
    wrong = [f"{name}: WRONG" for name, counts in found.items() if counts.get("WRONG")]
    wrong += [f"afterwards: {name}" for name in later if name != "right"]
    wrong += [] if later.get("right") else ["afterwards: no answers"]
    return wrong + (["clients hang"] if found["clients that hang"][""] else [])


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        return serve(*json.loads(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=REFUSED, default=list(REFUSED))
    parser.add_argument("--share", type=float, default=0.1, help="of the calls that fail")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=1)
    options, words = parser.parse_known_args()
    found = measure(options.kinds, options.share, options.seconds, options.seed, words)
    print(json.dumps(found))
    for failure in (wrong := failures(found)):
        print(failure)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
