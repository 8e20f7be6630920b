"""``python -m studies.attacks.http2 [FLOOD ...]``: floods one after the other, a line each; ``--list`` names them."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from studies.attacks.http2.beside import Outcome, beside
from studies.attacks.http2.floods import FLOODS

COLUMNS = (
    "| flood | sent | resident MiB before, peak, after | honest answers (lost, wrong) | p50/p99 ms before "
    "| p50/p99 ms during | newcomers (unanswered), worst ms | well after s | log KiB |"
)


def line(outcome: Outcome) -> str:
    """A row of the table."""
    before, during = outcome.honest_before, outcome.honest
    memory = f"{outcome.memory_before:.0f}, {outcome.memory_peak:.0f}, {outcome.memory_after:.0f}"
    well = "never" if outcome.well_after is None else f"{outcome.well_after}"
    return (
        f"| {outcome.flood} | {outcome.sent:,} | {memory} "
        f"| {during['answers'] - during['lost']} ({during['lost']}, {during['wrong']}) "
        f"| {before['p50']} / {before['p99']} | {during['p50']} / {during['p99']} "
        f"| {outcome.newcomers} ({outcome.newcomers_unanswered}), {outcome.newcomer_worst} | {well} "
        f"| {outcome.log_kib} |"
    )


def main() -> int:
    """The exit status: 0 if no honest answer was lost or wrong, and the server was well after every flood."""
    parser = argparse.ArgumentParser(prog="python -m studies.attacks.http2", description=__doc__)
    parser.add_argument("floods", nargs="*", metavar="FLOOD", help="all of them by default")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each flood")
    parser.add_argument("--json", type=Path, help="where the results go, beside those of other floods")
    parser.add_argument("--server", nargs="*", default=(), metavar="ARGUMENT", help="more arguments of cloud-server")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{name:45} {(made.__doc__ or '').splitlines()[0:1]}" for name, made in FLOODS.items()))
        return 0
    unknown = set(options.floods) - set(FLOODS)
    if unknown:
        parser.error(f"no such flood: {', '.join(sorted(unknown))}; see --list")
    torch.set_num_threads(1)
    good = True
    print(COLUMNS + "\n" + "|---" * (COLUMNS.count("|") - 1) + "|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.floods or FLOODS:
            outcome = beside(name, options.seconds, Path(folder), tuple(options.server))
            good = good and outcome.good
            print(line(outcome), flush=True)
            if options.json:
                known = json.loads(options.json.read_text()) if options.json.exists() else {}
                command = " ".join(["python -m studies.attacks.http2", *sys.argv[1:]])
                known[name] = {"date": time.strftime("%Y-%m-%d"), "command": command, **outcome.reported()}
                options.json.write_text(json.dumps(known, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
