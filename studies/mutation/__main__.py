"""``make mutation``: faults put into the guarding code, one at a time; does the suite notice?

    python -m studies.mutation --faults 300 --json docs/results/mutation.json
    python -m studies.mutation --covered FOLDER            with what an earlier run measured there

First the whole suite runs once under coverage: which test runs which line. Then each fault is put into a copy of the
project, and the tests that run its line are run until one fails, the nearest and quickest first. A run that is repeated
with the same --json continues where it was.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from studies.mutation.covering import Covering, measured
from studies.mutation.faults import GUARDS, Fault, drawn
from studies.mutation.trial import Copy, Outcome

ROOT = Path(__file__).resolve().parents[2]
ENOUGH = 0.9


def main() -> int:
    """The exit status: 0 if at least nine tenths of the faults were noticed."""
    options = _options()
    faults = drawn(ROOT, options.faults, options.seed, options.only)
    known = _known(options.json, options.seed)
    with tempfile.TemporaryDirectory(prefix="isthmus-mutation-") as name:
        folder = options.covered or Path(name) / "covered"
        if not (folder / ".coverage").exists():
            measured(ROOT, GUARDS, folder, options.processes)
        covering = Covering(folder)
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(options.processes):
            copies.put(Copy(ROOT, Path(name) / f"copy{number}"))
        until = time.monotonic() + 60 * options.minutes

        def tried(fault: Fault) -> Outcome | None:
            if time.monotonic() > until:
                return None
            copy = copies.get()
            try:
                return copy.tried(fault, covering)
            finally:
                copies.put(copy)

        waiting = [fault for fault in faults if fault.name not in known]
        with ThreadPoolExecutor(options.processes) as pool:
            for done in as_completed([pool.submit(tried, fault) for fault in waiting]):
                outcome = done.result()
                if outcome is not None:
                    known[outcome.fault.name] = outcome.reported()
                    print(f"{outcome.result:16} {outcome.seconds:5.0f} s  {outcome.fault.name}", flush=True)
                    _write(options, known)
        shutil.rmtree(name, ignore_errors=True)
    return _table(known)


def _table(known: dict[str, dict[str, Any]]) -> int:
    noticed = [one for one in known.values() if one["result"].startswith("noticed")]
    for name, one in sorted(known.items()):
        if one not in noticed:
            print(f"{one['result']:34} {name}")
    print(f"\n{len(known)} faults, {len(noticed)} noticed: {100 * len(noticed) / max(1, len(known)):.1f} %")
    return 0 if len(noticed) >= ENOUGH * len(known) else 1


def _known(file: Path | None, seed: int) -> dict[str, dict[str, Any]]:
    if file is None or not file.exists():
        return {}
    kept = json.loads(file.read_text())
    return kept["faults"] if kept["seed"] == seed else {}  # type: ignore[no-any-return]


def _write(options: argparse.Namespace, known: dict[str, dict[str, Any]]) -> None:
    if options.json is None:
        return
    counted = Counter(one["result"] for one in known.values())
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    reported = {
        "command": "python -m studies." + " ".join(["mutation", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "seed": options.seed,
        "counted": dict(counted),
        "faults": known,
    }
    options.json.write_text(json.dumps(reported, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m studies.mutation", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--faults", type=int, default=300, help="default: 300")
    parser.add_argument("--seed", type=int, default=1, help="which faults; default: 1")
    parser.add_argument("--only", default="", metavar="TEXT", help="files with this in their path")
    parser.add_argument("--processes", type=int, default=2, help="default: 2")
    parser.add_argument("--minutes", type=float, default=600, help="no fault is begun after so long")
    parser.add_argument("--covered", type=Path, metavar="FOLDER", help="where the measured run is kept")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the outcomes go, and come from")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
