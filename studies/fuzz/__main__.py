"""``make fuzz``: random models for a long time, on several processes; failures are printed and kept as source.

A process that dies (a segmentation fault) is a failure, too: its last program is in ``running-N.py``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from studies.fuzz.hunt import Known, Tally
from studies.fuzz.worker import running, work


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 if nothing was silently wrong and nothing failed outside of the error tree."""
    options = _options(arguments)
    options.results.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    workers = [
        context.Process(target=work, args=(number, options, queue), daemon=True) for number in range(options.processes)
    ]
    for worker in workers:
        worker.start()
    total, known, working, died = Tally(), list[Known](), set(range(options.processes)), 0
    counted: Counter[str] = Counter()
    while working:
        time.sleep(0.1)
        alive = {number for number in working if workers[number].is_alive()}
        while not queue.empty():
            kind, number, *reported = queue.get()
            if kind == "round":
                total.join(reported[0])
                _progress(total, time.monotonic() - began)
            elif kind == "failure":
                known.append(reported[0])
                _kept(options.results, len(known), reported[0])
            elif kind == "counted":
                counted.update(reported[0])
            else:
                working.discard(number)
        for number in working - alive:
            if not workers[number].is_alive() and queue.empty():
                working.discard(number)
                died += 1
                print(f"\nprocess {number} died ({workers[number].exitcode}) on {options.results / running(number)}")
    total.seconds = time.monotonic() - began
    print("\n" + total.table())
    for reason, count in total.reasons.most_common(options.reasons):
        print(f"{count:7d}  {reason}")
    for failure in known:
        print(f"\n{'=' * 100}\n# explains {counted[failure.reported]} failing programs\n{failure.reported}")
    return 1 if known or died else 0


def _kept(results: Path, number: int, known: Known) -> None:
    path = results / f"failure-{number:03d}.py"
    path.write_text(known.reported, encoding="utf-8")
    print(f"\n{known.verdict.outcome.value}, {known.verdict.kind}: {path}", flush=True)


def _progress(total: Tally, seconds: float) -> None:
    rate = total.programs / max(seconds, 1e-9)
    print(f"\r{total.programs} programs, {rate:.0f} a second, {total.failing} failing ", end="", flush=True)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=20_000, help="how many to judge, on all processes together")
    parser.add_argument("--minutes", type=float, default=60.0, help="end after so long, whatever was judged")
    parser.add_argument("--seed", type=int, default=1, help="equal seeds judge equal programs")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, default=Path("build/fuzz"), help="where failures are kept")
    parser.add_argument("--reasons", type=int, default=20, help="how many reasons of refusals to print")
    parser.add_argument("--no-shrink", action="store_true", help="keep failures as they were drawn")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
