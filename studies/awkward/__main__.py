"""``python -m studies.awkward``: every kind of awkward model at every place, every cut, each tail on a cold model.

``--json FILE`` keeps what came of each; ``--only TEXT`` takes the names that contain it. Exit code 1 if an answer was
wrong, or an error is not one of the project's own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from studies.awkward.kinds import KINDS, PLACES, source
from studies.fuzz.judge import Judge, Outcome, Subject


def look(kind: str, place: str) -> dict[str, Any]:
    """What came of one model: cuts by outcome, and the first of each that is not exact."""
    found = Judge(Subject(source(kind, place)), cold=True).staying(3)
    counts = Counter(verdict.outcome.value for verdict in found.verdicts)
    said: dict[str, str] = {}
    for verdict in found.verdicts:
        if verdict.outcome is not Outcome.EXACT:
            said.setdefault(verdict.outcome.value, f"{verdict.where}: {verdict.detail}"[:400])
    return {"counts": dict(counts), "said": said}


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m studies.awkward", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    models: dict[str, Any] = {}
    for kind in KINDS:
        for place in PLACES:
            name = f"{kind}, {place}"
            if options.only in name:
                models[name] = look(kind, place)
                reported = models[name]
                print(f"{name}: {reported['counts']} {next(iter(reported['said'].values()), '')[:160]!r}", flush=True)
    cuts = sum((Counter(one["counts"]) for one in models.values()), Counter[str]())
    refused = sum(not one["counts"].get("exact") for one in models.values())
    summary = {"models": len(models), "cuts": dict(cuts), "models that no cut answers": refused}
    print(summary)
    if options.json:
        reported = {"date": time.strftime("%Y-%m-%d"), "command": "python -m studies.awkward", **summary, "of": models}
        options.json.write_text(json.dumps(reported, indent=1) + "\n")
    return 1 if cuts[Outcome.WRONG.value] or cuts[Outcome.OUTSIDE.value] else 0


if __name__ == "__main__":
    sys.exit(main())
