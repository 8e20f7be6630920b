"""``python -m studies.experiments prediction|trace|codecs|all``: measure, print, write JSON.

Exit status 2 if it cannot.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from studies.experiments import needs

EXPERIMENTS = ("prediction", "trace", "codecs")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.experiments", description=__doc__)
    parser.add_argument("experiment", choices=(*EXPERIMENTS, "all"))
    parser.add_argument("--quick", action="store_true", help="fewer models, cuts and repetitions: a look, not a result")
    parser.add_argument("--model", action="append", metavar="NAME", help="only this one; may be repeated")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="write prediction.json, trace.json, codecs.json there"
    )
    options = parser.parse_args(argv)
    try:
        needs.check()
    except needs.Missing as missing:
        print(f"experiments: {missing}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    os.environ["OMP_NUM_THREADS"] = "1"
    from studies.benchmarks import machine
    from studies.experiments import report

    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
    try:
        for name in EXPERIMENTS if options.experiment == "all" else (options.experiment,):
            facts = {**machine.facts(), "load_before": round(os.getloadavg()[0], 2)}
            found = {"machine": facts, "quick": options.quick, **_run(name, options)}
            print(report.text(name, found), flush=True)
            if options.output:
                (options.output / f"{name}.json").write_text(report.kept(found))
    except KeyboardInterrupt:
        print("experiments: interrupted", file=sys.stderr)
        return 130
    return 0


def _run(name: str, options: argparse.Namespace) -> dict[str, Any]:
    if name == "prediction":
        from studies.experiments import prediction as experiment
    elif name == "codecs":
        from studies.experiments import codecs as experiment  # type: ignore[no-redef]
    else:
        from studies.experiments import trace as experiment  # type: ignore[no-redef]
    scope: Any = experiment.QUICK if options.quick else experiment.FULL
    if options.model:
        scope = dataclasses.replace(scope, models=tuple(options.model))
    return experiment.run(scope, lambda text: print(text, file=sys.stderr, flush=True))


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
