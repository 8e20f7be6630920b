"""Cut the models of seven libraries, each at a sample of its layers, and compare bit for bit.

    python -m studies.library                                   everything, some hours on one core
    python -m studies.library --families timm --models 20       a sample
    python -m studies.library --only swinv2 --cuts 0            all cuts of the models with that in their name
    python -m studies.library --json FILE --report --summary OTHER    what docs/results keeps of it
    python -m studies.library --json FILE                       keeps the records there, and continues where it was

All but transformers are no dependencies of the project: `pip install --no-deps timm torchvision diffusers
torch_geometric segmentation-models-pytorch` into a folder beside (torchvision's release for the installed torch), or
what is missing is left out. Nothing is downloaded: weights are random.
Exit code 1 if an answer was wrong or an error is not one of the project's own.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TORCH_COMPILE_DISABLE"] = "1"  # of functions that replace an extension: other bits, some of the time

from studies.library.check import Sample
from studies.library.report import causes, kept, outcomes, summary, table
from studies.library.subject import Subject
from studies.library.sweep import Journal, look


def families() -> dict[str, Callable[[], Iterator[Subject]]]:
    """By name; imported when asked for."""
    from studies.library import others, pictures, small

    def transformers(*, cache: bool) -> Iterator[Subject]:
        from studies.library import hub

        return hub.subjects(cache=cache)

    return {
        "transformers": lambda: transformers(cache=False),
        "transformers-cache": lambda: transformers(cache=True),
        "timm": pictures.timm_subjects,
        "torchvision": pictures.vision_subjects,
        "detection": others.detection_subjects,
        "pyg": others.graph_subjects,
        "segmentation": others.segmentation_subjects,
        "diffusers": others.diffusion_subjects,
        "small": small.subjects,
    }


def chosen(names: list[str], only: str, models: int, seed: int) -> list[Subject]:
    """The subjects in an order drawn by the seed, so that a sweep cut short is a sample; families take turns."""
    lists = []
    known = families()
    for name in names:
        try:
            found = [one for one in known[name]() if only in one.name]
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        random.Random(seed).shuffle(found)
        lists.append(found[: models or None])
    return [one for turn in itertools.zip_longest(*lists) for one in turn if one is not None]


def engine() -> str:
    """The commit of the engine that is judged; "" outside of a repository."""
    here = Path(__file__).parent
    reported = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, check=False
    )
    return reported.stdout.strip()


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m studies.library", description=__doc__.partition("\n")[0])
    parser.add_argument("--families", default=",".join(families()), help="default: all")
    parser.add_argument("--only", default="", help="models with this in their name")
    parser.add_argument("--models", type=int, default=0, help="at most so many of each family")
    parser.add_argument(
        "--cuts", type=int, default=8, help="of each model; 0 is all. One model in ten has all its cuts"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds-per-model", type=float, default=30.0, help="of processor time")
    parser.add_argument("--memory-gib", type=float, default=8.0, help="of address space, for one model")
    parser.add_argument("--summary", type=Path, help="write counts and causes there, as in docs/results/library.json")
    parser.add_argument("--report", action="store_true", help="only print what the file of results holds")
    given = parser.parse_args()
    journal = Journal(given.json)
    sample = Sample(given.cuts, given.seed, given.seconds_per_model)
    commit = engine()
    todo = [] if given.report else chosen(given.families.split(","), given.only, given.models, given.seed)
    for number, subject in enumerate(todo):
        if subject.key in journal.records:
            continue
        own = replace(sample, cuts=0) if number % 10 == 9 else sample
        record = look(subject, own, int(given.memory_gib * (1 << 30))) | {"engine": commit}
        journal.add(subject.key, record)
        reported = dict(outcomes(record)) or record.get("why", "")[:150]
        print(f"{number + 1}/{len(todo)} {subject.key} {record['status']} {record['seconds']} s {reported}", flush=True)
    found = summary(journal.records)
    print(table(found))
    for cause, where in causes(journal.records).items():
        print(f"\n{len(where)} x {cause}")
        for place in where[:4]:
            print(f"    {place}")
    if given.summary is not None:
        reported = {"date": str(datetime.date.today()), **kept(journal.records)}
        given.summary.write_text(json.dumps(reported, indent=1) + "\n")
    bad = sum(facts["cuts"]["wrong"] + facts["cuts"]["error"] + facts["crash"] for facts in found.values())
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
