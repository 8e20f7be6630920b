"""Workers that shoot (`bulk.work`), watched: one that dies or hangs is counted with the seed that does it again."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from studies.attacks import bulk
from studies.attacks.corpus import Recording, corpus

HANG = 60.0
"""Seconds after which a volley counts as a hang; a rehearsal may take 5, and each of a dozen requests 10."""


@dataclass
class Tally:
    """What came of all volleys so far; kept in a file, so that runs add up.

    ``frames``: sent. ``read``: those of changed requests whose content was looked at, which are the ones that count.
    """

    volleys: int = 0
    frames: int = 0
    read: int = 0
    honest: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    crashes: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0
    slowest_volley: str = ""
    runs: list[str] = field(default_factory=list)
    """Seeds, the first number, and processes."""
    memory: dict[str, list[list[float]]] = field(default_factory=dict)
    """By worker: pairs of frames sent so far and MiB resident then."""

    @classmethod
    def read_from(cls, file: Path) -> Tally:
        found = cls(**json.loads(file.read_text())) if file.exists() else cls()
        found.outcomes = Counter(found.outcomes)
        return found

    def reported(self) -> dict[str, Any]:
        """As JSON, with some of the looks at memory only."""
        thinned = {name: looks[:: 1 + len(looks) // 20] for name, looks in self.memory.items()}
        return {**vars(self), "outcomes": dict(self.outcomes.most_common()), "memory": thinned}

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(self.reported(), indent=1) + "\n")


class Worker:
    """One forked process, and the last volley it said it would fire."""

    def __init__(self, recordings: list[Recording], seed: int, first: int, seconds: float) -> None:
        context = multiprocessing.get_context("fork")
        self.seed, self.number, self.done = seed, first, False
        self.heard = time.monotonic()
        self.frames = 0
        self.pipe, other = context.Pipe(duplex=False)

        def report(*reported: Any) -> None:
            other.send(reported)

        self.process = context.Process(target=bulk.work, args=(recordings, seed, first, seconds, report), daemon=True)
        self.process.start()
        other.close()

    @property
    def name(self) -> str:
        return f"{self.seed}:{self.number}"


def hunt(tally: Tally, frames: int, seed: int, minutes: float, processes: int, file: Path | None) -> None:
    """Shoot until ``frames`` are read in all or the time is over."""
    recordings = corpus()
    began, seconds = time.monotonic(), minutes * 60
    workers = [Worker(recordings, seed * 1000 + n, tally.volleys, seconds) for n in range(processes)]
    tally.runs.append(f"seeds {', '.join(str(worker.seed) for worker in workers)} from {tally.volleys} on")
    while workers and time.monotonic() - began < seconds + HANG:
        for worker in list(workers):
            _listen(worker, tally)
            died = not worker.process.is_alive() and not worker.pipe.poll()
            if worker.done:
                worker.process.join()
                workers.remove(worker)
            elif died or time.monotonic() - worker.heard > HANG:
                (tally.crashes if died else tally.hangs).append(f"{worker.name} ({worker.process.exitcode})")
                worker.process.kill()
                workers.remove(worker)
                left = seconds - (time.monotonic() - began)
                if left > 5:
                    workers.append(Worker(recordings, worker.seed, worker.number + 1, left))
        if file is not None:
            tally.write(file)
        if tally.read >= frames:
            break
    for worker in workers:
        worker.process.kill()
    tally.seconds += round(time.monotonic() - began, 1)
    if file is not None:
        tally.write(file)


def _listen(worker: Worker, tally: Tally) -> None:
    until = time.monotonic() + 0.5
    while time.monotonic() < until and worker.pipe.poll(0.2):
        try:
            kind, number, *reported = worker.pipe.recv()
        except EOFError:
            return
        worker.heard, worker.number = time.monotonic(), number
        if kind == "failed":
            tally.wrong.append(f"{worker.name} {reported[0]}")
        elif kind == "slow" and reported[0] > tally.slowest:
            tally.slowest, tally.slowest_volley = round(reported[0], 2), worker.name
        elif kind == "counted":
            counts: bulk.Counts = reported[0]
            tally.outcomes.update(counts.outcomes)
            tally.volleys += sum(n for name, n in counts.outcomes.items() if name.startswith("volleys: "))
            tally.frames += counts.frames
            tally.read += counts.read
            tally.honest += counts.honest
            worker.frames += counts.frames
            looks = tally.memory.setdefault(f"{worker.seed} ({worker.process.pid})", [])
            looks.append([worker.frames, round(counts.rss, 1)])
        elif kind == "done":
            worker.done = True
