"""Split `generate()` of transformers' classes, made small, against the same in one process, bit for bit.

    python -m studies.generation architectures                  every class that generates: an hour on two cores
    python -m studies.generation architectures --sample 20      some of them, drawn
    python -m studies.generation architectures --only Gemma     classes with that in their name
    python -m studies.generation modes --mode beams --cuts first,last
    python -m studies.generation privacy                        token ids and embeddings in what crosses
    python -m studies.generation ... --json FILE                a line a class, kept there; continues where it was
    python -m studies.generation ... --json FILE --report --summary OTHER    what docs/results keeps of it
    python -m studies.generation ... --engine whole             splits nothing: what the harness can judge

Nothing is downloaded: weights are random. Exit code 1 if anything differed, failed or was found.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

from studies.generation import report
from studies.generation.cases import EQUAL, NOT_COUNTED, REFUSED, Look, architecture
from studies.generation.engine import ENGINES
from studies.generation.forked import Limits, Work, each
from studies.generation.modes import modes, zoo
from studies.generation.privacy import NOTHING, SHOWN, SILENT, privacy
from studies.generation.subject import Subject, preload, subjects
from studies.library.__main__ import engine as commit

FINE = (EQUAL, REFUSED, NOTHING, SHOWN, SILENT, *NOT_COUNTED)


def chosen(given: argparse.Namespace) -> list[Subject]:
    """The subjects, in their order; a sample is drawn by the seed."""
    found = subjects() if given.what == "architectures" else zoo()
    found = [one for one in found if given.only in one.key]
    if given.sample and given.sample < len(found):
        drawn = set(random.Random(given.seed).sample(range(len(found)), given.sample))
        found = [one for number, one in enumerate(found) if number in drawn]
    return found


def work_of(given: argparse.Namespace) -> Work:
    """What is done with each."""
    engine = ENGINES[given.engine]
    if given.what == "privacy":
        return functools.partial(privacy, engine)
    default = "middle" if given.what == "modes" else "first,middle,last,inside"
    look = Look(engine, given.mode, tuple((given.cuts or default).split(",")))
    return functools.partial(modes if given.what == "modes" else architecture, look)


def read(path: Path | None, what: str, engine: str) -> report.Records:
    """The records of a file that are of this kind."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {one["key"]: one for one in lines if (one["what"], one["engine"]) == (what, engine)}


def tell(records: report.Records, what: str) -> None:
    """Print what the records hold."""
    if what == "architectures":
        print(report.table(report.summary(records)))
    print("\n" + report.by_case(records))
    for cause, where in report.causes(records).items():
        print(f"\n{len(where)} x {cause}")
        for place in where[:6]:
            print(f"    {place}")


def versions() -> dict[str, str]:
    """Return the versions of the packages that the result depends on."""
    return {name: importlib.metadata.version(name) for name in ("torch", "transformers")}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.generation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("architectures", "modes", "privacy"))
    parser.add_argument("--engine", choices=ENGINES, default="split")
    parser.add_argument("--only", default="", metavar="NAME", help="classes with this in their name")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="so many of them, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="how many processes at once")
    parser.add_argument("--mode", default="", metavar="NAME", help="cases with this in their name")
    parser.add_argument(
        "--cuts", default="", help="some of first,middle,last,inside; default: all, of modes the middle"
    )
    parser.add_argument("--memory-gib", type=float, default=7.0, help="of address space, for one class")
    parser.add_argument("--minutes", type=float, default=30.0, help="by the clock, for one class")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="write counts and causes there, for docs/results")
    parser.add_argument("--report", action="store_true", help="only print what the file holds")
    given = parser.parse_args()
    records = read(given.json, given.what, given.engine)
    if not given.report:
        _run(given, records)
    tell(records, given.what)
    if given.summary is not None:
        facts = {"what": given.what, "engine": given.engine, "commit": commit(), "date": str(datetime.date.today())}
        given.summary.write_text(json.dumps({**facts, **versions(), **report.kept(records)}, indent=1) + "\n")
    bad = any(facts["outcome"] not in FINE for record in records.values() for _, facts in report.cases(record))
    return 1 if bad else 0


def _run(given: argparse.Namespace, records: report.Records) -> None:
    preload()
    todo = [one for one in chosen(given) if one.key not in records]
    limits = Limits(int(given.memory_gib * (1 << 30)), given.minutes * 60)
    for number, (subject, found) in enumerate(each(todo, work_of(given), jobs=given.jobs, limits=limits), 1):
        facts: dict[str, Any] = {"what": given.what, "engine": given.engine, "key": subject.key}
        record = records[subject.key] = facts | {"lists": subject.lists, **found}
        if given.json is not None:
            with given.json.open("a") as file:
                file.write(json.dumps(record) + "\n")
        reported = report.reported(record)
        print(f"{number}/{len(todo)} {subject.key} {record['status']} {record['seconds']} s {reported}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
