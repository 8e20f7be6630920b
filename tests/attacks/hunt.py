"""Workers that shoot (`bulk.work`), watched: one that dies or hangs is counted with the seed that does it again."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.attacks import bulk
from tests.attacks.corpus import Recording, corpus

HANG = 60.0
"""Seconds after which a shot counts as a hang; a rehearsal may take 5."""


@dataclass
class Tally:
    """What came of all shots so far; kept in a file, so that runs add up."""

    shots: int = 0
    frames: int = 0
    honest: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    crashes: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0
    slowest_seed: str = ""
    rss: list[list[float]] = field(default_factory=list)
    """MiB of each worker at its beginning and at its end, and the frames between."""

    @classmethod
    def read(cls, file: Path) -> Tally:
        found = cls(**json.loads(file.read_text())) if file.exists() else cls()
        found.outcomes = Counter(found.outcomes)
        return found

    def write(self, file: Path) -> None:
        file.write_text(json.dumps({**vars(self), "outcomes": dict(self.outcomes.most_common())}, indent=1) + "\n")


class Worker:
    """One forked process, and the last shot it said it would fire."""

    def __init__(self, recordings: list[Recording], seed: int, first: int, seconds: float, deep: float) -> None:
        context = multiprocessing.get_context("fork")
        self.seed, self.number, self.done = seed, first, False
        self.heard = time.monotonic()
        self.pipe, other = context.Pipe(duplex=False)

        def report(*told: Any) -> None:
            other.send(told)

        self.process = context.Process(
            target=bulk.work, args=(recordings, seed, first, seconds, deep, report), daemon=True
        )
        self.process.start()
        other.close()

    @property
    def name(self) -> str:
        return f"{self.seed}:{self.number}"


def hunt(tally: Tally, frames: int, seed: int, minutes: float, processes: int, deep: float, file: Path | None) -> None:
    """Shoot until ``frames`` are sent in all or the time is over."""
    recordings = corpus(seed)
    began, seconds = time.monotonic(), minutes * 60
    workers = [Worker(recordings, seed * 1000 + n, tally.shots, seconds, deep) for n in range(processes)]
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
                    workers.append(Worker(recordings, worker.seed, worker.number + 1, left, deep))
        if file is not None:
            tally.write(file)
        if tally.frames >= frames:
            break
    for worker in workers:
        worker.process.kill()
    tally.seconds += time.monotonic() - began


def _listen(worker: Worker, tally: Tally) -> None:
    until = time.monotonic() + 0.5
    while time.monotonic() < until and worker.pipe.poll(0.2):
        try:
            kind, number, *told = worker.pipe.recv()
        except EOFError:
            return
        worker.heard, worker.number = time.monotonic(), number
        if kind == "failed":
            tally.wrong.append(f"{worker.name} {told[0]}")
        elif kind == "slow" and told[0] > tally.slowest:
            tally.slowest, tally.slowest_seed = told[0], worker.name
        elif kind == "counted":
            counted, frames, honest, before, now, _ = told
            tally.outcomes.update(counted)
            tally.shots += counted["shots"]
            tally.frames += frames
            tally.honest += honest
            _remember(tally, os.getpid() * 1000 + worker.seed % 1000, before, now, frames)
        elif kind == "done":
            worker.done = True


def _remember(tally: Tally, who: float, before: float, now: float, frames: int) -> None:
    for entry in tally.rss:
        if entry[0] == who and entry[1] == before:
            entry[2], entry[3] = now, entry[3] + frames
            return
    tally.rss.append([who, before, now, frames])
