"""One volley of a run fired again in this process, or all from one number to another."""

from __future__ import annotations

import re

from studies.attacks.bulk import EVERY, Target, ask
from studies.attacks.corpus import corpus
from studies.attacks.volleys import Gunner


def again(name: str) -> int:
    """``SEED:NUMBER`` or ``SEED:FIRST-LAST``, as a run tells them.

    Prints what was sent and what came of it; returns 1 when an honest answer was wrong.
    """
    found = re.fullmatch(r"(\d+):(\d+)(?:-(\d+))?", name)
    if found is None:
        raise SystemExit(f"--again: expected SEED:NUMBER or SEED:FIRST-LAST, found {name}")
    seed, first = int(found[1]), int(found[2])
    recordings = corpus()
    gunner, target, bad = Gunner(recordings, seed), Target(), 0
    honest = [recording for recording in recordings if not target.honest(recording, 1 << 40)]
    for number in range(first, int(found[3] or first) + 1):
        volley = gunner.volley(number)
        outcome, _ = target.fire(volley)
        jumbled = ", jumbled" if volley.jumbled else ""
        where = f"{volley.kind}{jumbled}, {volley.model_id} at {volley.cut}"
        print(f"{volley.name} {volley.digest}: {len(volley.frames)} frames ({where})", flush=True)
        print(f"  {', '.join(outcome) or 'no word'}\n  the last said: {target.said or 'nothing'}", flush=True)
        if (number + 1) % EVERY == 0 and (wrong := ask(target, honest, number + 1)):
            bad = 1
            print(f"  honest: {wrong}")
    return bad
