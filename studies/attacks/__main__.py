"""``make attacks``: attacks by hand on a server process, mutated requests over gRPC, then in bulk without it.

``--tally FILE`` keeps what was counted in bulk, so that runs add up. ``--again SEED:NUMBER`` fires one volley of a run
again in this process, ``--again SEED:FIRST-LAST`` all of them, with the honest requests that came between.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from studies.attacks.again import again
from studies.attacks.byhand import by_hand
from studies.attacks.corpus import corpus
from studies.attacks.hunt import Tally, hunt
from studies.attacks.live import Outcome, attacked, mutated
from studies.attacks.table import table

BY_HAND, LIVE, TWO, BULK = PARTS = ("by hand", "over gRPC", "two workers", "in bulk")


def main() -> int:
    """The exit status: 0 if the server lives, nothing hung and no honest answer was wrong."""
    options = _options()
    torch.set_num_threads(1)
    if options.again:
        return again(options.again)
    seconds, recordings = options.minutes * 60, corpus()
    outcomes: dict[str, Outcome] = {}
    tally = Tally.read_from(options.tally) if options.tally else Tally()
    with tempfile.TemporaryDirectory() as folder:
        for name, volleys, share, workers in (
            (BY_HAND, by_hand(), 0.15, 1),
            (LIVE, mutated(recordings, options.seed), 0.35, 1),
            (TWO, mutated(recordings, options.seed + 1), 0.1, 2),
        ):
            if name in options.parts:
                outcomes[name] = attacked(Path(folder), volleys, share * seconds, options.frames, workers)
                print(f"{name}: {outcomes[name].frames:,} frames in {outcomes[name].seconds:.0f} s", flush=True)
                _write(options, name, outcomes[name].reported())
    if BULK in options.parts:
        hunt(tally, options.frames, options.seed, 0.4 * options.minutes, options.processes, options.tally)
        _write(options, BULK, tally.reported())
    print(table(outcomes, tally))
    bad = tally.crashes or tally.hangs or tally.wrong
    return 0 if not bad and all(outcome.good for outcome in outcomes.values()) else 1


def _write(options: argparse.Namespace, part: str, reported: dict[str, Any]) -> None:
    """One part's result, beside those of other runs."""
    if options.json is None:
        return
    known = json.loads(options.json.read_text()) if options.json.exists() else {}
    command = " ".join(["python -m studies.attacks", *sys.argv[1:]])
    known[part] = {"date": time.strftime("%Y-%m-%d"), "command": command, **reported}
    options.json.write_text(json.dumps(known, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m studies.attacks", description=__doc__)
    parser.add_argument(
        "--frames", type=int, default=1_000_000, help="a part ends at so many; in bulk those that are read count"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=15.0, help="60 %% over gRPC at most, 40 %% in bulk")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {PARTS}")
    parser.add_argument("--processes", type=int, default=1, help="in bulk")
    parser.add_argument("--tally", type=Path, help="JSON of the bulk run, to go on with")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--again", metavar="SEED:NUMBER[-LAST]", help="volleys of a run")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
