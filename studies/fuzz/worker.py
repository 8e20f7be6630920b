"""One process of a long run. (A module of its own: the name ``__main__`` cannot be found again by a new process.)"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from studies.fuzz.alone import alone
from studies.fuzz.hunt import ROUND, Hunt, Tally


def work(number: int, options: argparse.Namespace, queue: Any) -> None:
    """Judge a share of the programs; put (what, number of this process, ...) into the queue."""
    torch.set_num_threads(1)
    path = options.results / running(number)
    hunt = Hunt(before=lambda text: _write(path, text))
    share = options.programs // options.processes
    ends = time.monotonic() + 60 * options.minutes
    turn = 0
    for found in hunt.alone(alone()) if number == 0 else []:
        queue.put(("failure", number, found))
    queue.put(("round", number, hunt.tally))
    while hunt.tally.programs < share and time.monotonic() < ends:
        done, hunt.tally = hunt.tally, Tally()
        found = hunt.round((options.seed << 24) + (turn << 4) + number, min(ROUND, share), not options.no_shrink)
        queue.put(("round", number, hunt.tally))
        hunt.tally.join(done)
        if found is not None:
            queue.put(("failure", number, found))
        turn += 1
    path.unlink(missing_ok=True)
    queue.put(("counted", number, Counter({hunt.known[i].reported: count for i, count in hunt.counted.items()})))
    queue.put(("done", number))


def running(number: int) -> str:
    """The file that holds the program which process ``number`` is at."""
    return f"running-{number}.py"


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
