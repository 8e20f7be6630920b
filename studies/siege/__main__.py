"""``make siege``: every case on a fresh server, overload, and a crowd: a table and, with --json, JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from studies.siege.cases import CASES
from studies.siege.material import make
from studies.siege.overload import CROWD, Crowd, Overload, crowd, overload
from studies.siege.table import table
from studies.siege.trial import OTHER, SAME, Outcome, Siege, Who, with_tokens

WHO = {"other": OTHER, "same": SAME}
LOADS: dict[str, Callable[[Siege, Who], Overload | Crowd]] = {"overload": overload, "crowd": crowd}


def main() -> int:
    """The exit status: 0 if nothing falls short."""
    options = _options()
    outcomes: list[Outcome] = []
    loads: list[Overload | Crowd] = []
    with tempfile.TemporaryDirectory() as folder:
        home = options.keep or Path(folder)
        home.mkdir(parents=True, exist_ok=True)
        material = home / "material.json"
        make().write(material)
        with Siege(home, material, options.workers) as siege:
            known = {**WHO, "identity": with_tokens(home, CROWD, options.weight)}
            for who in options.who:
                for name in options.cases:
                    outcome = siege.run(CASES[name], known[who], options.seconds)
                    outcomes.append(outcome)
                    verdict = "; ".join(outcome.faults) or "ok"
                    print(f"{name} ({who}, {outcome.seconds:.0f} s): {verdict}"[:400], flush=True)
                    mine = [one.json() for one in outcomes if one.who == known[who].name]
                    _write(options.json, f"cases, {known[who].name}", mine)
                for name in options.loads:
                    load = LOADS[name](siege, known[who])
                    loads.append(load)
                    print(load, flush=True)
                    _write(options.json, f"{name}, {known[who].name}", load.json())
    if outcomes:
        print(table(outcomes))
    return 1 if any(one.faults for one in (*outcomes, *loads)) else 0


def _write(path: Path | None, name: str, reported: Any) -> None:
    """One part's result, beside those that are there."""
    if path is None:
        return
    known = json.loads(path.read_text()) if path.exists() else {}
    command = " ".join(["python -m studies.siege", *sys.argv[1:]])
    known[name] = {"date": time.strftime("%Y-%m-%d"), "command": command, "result": reported}
    path.write_text(json.dumps(known, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m studies.siege", description=__doc__)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES), metavar="CASE", help=f"of {[*CASES]}")
    parser.add_argument("--loads", nargs="*", choices=LOADS, default=list(LOADS), help="floods of many requests")
    parser.add_argument(
        "--who", nargs="+", choices=[*WHO, "identity"], default=["other", "identity"], help="whom the hostile client is"
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="of each phase: without, with, and after")
    parser.add_argument("--weight", type=float, default=1.0, help="of the hostile identity; the others have 1")
    parser.add_argument("--workers", type=int, default=1, help="of the server")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--keep", type=Path, help="a folder for the servers' logs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
