"""``make attacks``: the families on a server process, then mutated requests over gRPC, then in bulk without it.

``--tally FILE`` keeps what was counted in bulk, so that runs add up; ``--again SEED:NUMBER`` fires one shot of a bulk
run again, in this process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests.attacks.bulk import Target
from tests.attacks.corpus import DIGITS, KEEPER, READER, Recording, corpus, record
from tests.attacks.families import Attack, literals, memory, places, wire
from tests.attacks.hunt import Tally, hunt
from tests.attacks.live import attacked, mutated
from tests.attacks.mutation import Mutator

FAMILIES = (memory, places, literals, wire)


def by_hand(*, small: bool = False) -> Iterator[Attack]:
    """All families on recordings of all models."""
    recordings: list[Recording] = [
        *record(KEEPER, 1, 2), *record(READER, 1 if small else 3, 3), *record(DIGITS, 1, 24)
    ]  # fmt: skip
    return chain.from_iterable(family.attacks(recordings) for family in FAMILIES)


def main() -> int:
    """The exit status: 0 if the server lives, nothing hung and no honest answer was wrong."""
    options = _options()
    torch.set_num_threads(1)
    if options.again:
        return _again(options.again)
    found, good = {}, True
    with tempfile.TemporaryDirectory() as folder:
        share = options.minutes * 60 / 3
        recordings = corpus(options.seed)
        for name, attacks in (("by hand", by_hand()), ("over gRPC", mutated(recordings, options.seed))):
            outcome = attacked(Path(folder), attacks, share)
            found[name] = {**vars(outcome), "outcomes": dict(outcome.outcomes.most_common())}
            good &= outcome.alive and not outcome.hangs and not outcome.honest["wrong"]
            print(json.dumps({name: found[name]}, indent=1), flush=True)
    tally = Tally.read(options.tally) if options.tally else Tally()
    hunt(tally, options.frames, options.seed, options.minutes / 3, options.processes, 0.25, options.tally)
    good &= not (tally.crashes or tally.hangs or tally.wrong)
    found["in bulk"] = {**vars(tally), "outcomes": dict(tally.outcomes.most_common())}
    print(json.dumps({"in bulk": found["in bulk"]}, indent=1))
    if options.json:
        options.json.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), **found}, indent=1) + "\n")
    return 0 if good else 1


def _again(name: str) -> int:
    seed, number = map(int, name.split(":"))
    recordings = corpus(seed // 1000)
    recording, shot = Mutator(recordings, seed * 1_000_003 + number).shot(0.25)
    target = Target()
    told, _ = target.fire(recording.model_id, shot.frames(number + 1))
    print(recording.model_id, recording.told["cut"], told, target.said)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000, help="in bulk, in all runs of --tally together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=15.0, help="a third each: by hand, over gRPC, in bulk")
    parser.add_argument("--processes", type=int, default=2, help="in bulk")
    parser.add_argument("--tally", type=Path, help="JSON of the bulk run, to go on with")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--again", metavar="SEED:NUMBER", help="one shot of a bulk run")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
