"""What a run of `make attacks` found, as a table of at most 100 columns."""

from __future__ import annotations

from collections import Counter

from studies.attacks.flatness import Flatness
from studies.attacks.hunt import Tally
from studies.attacks.live import Outcome

ROW = "{:<20}{:>11}{:>11}{:>9}{:>9}{:>7}{:>7}{:>9}{:>11}"
WIDTH = 100


def table(outcomes: dict[str, Outcome], tally: Tally) -> str:
    """One row a part, then what came of the frames, memory, and what went wrong."""
    lines = ["", ROW.format("", "frames", "read", "seconds", "crashes", "hangs", "wrong", "honest", "slowest")]
    for name, one in outcomes.items():
        wrong = len(one.honest["wrong"]) + len(one.honest["lost"])
        row = (int(not (one.alive and one.status == 0)), len(one.hangs), wrong, one.honest["asked"])
        lines.append(_row(name, one.frames, one.read, one.seconds, *row, one.slowest))
    if tally.volleys:
        row = (len(tally.crashes), len(tally.hangs), len(tally.wrong), tally.honest)
        lines.append(_row("in bulk", tally.frames, tally.read, tally.seconds, *row, tally.slowest))
    lines += [
        "",
        "read: frames of changed requests whose content was looked at; others pad (honest uploads, repeated",
        "frames, all behind a stream's end). wrong: honest answers that were wrong or did not come.",
        "",
        "resident memory of the server, MiB (in bulk: of each worker, by seed and process)",
    ]
    lines += [f"  {name:<18}{Flatness.of(one.looks)}" for name, one in outcomes.items()]
    lines += [f"  {name:<18}{Flatness.of(looks)}" for name, looks in tally.memory.items() if looks]
    lines += ["", "honest client beside it"]
    lines += [
        f"  {name:<18}{one.honest['p50_ms']} ms in the middle, 99 % within {one.honest['p99_ms']} ms, weights' hash "
        f"{'unchanged' if one.weights_hash_unchanged else 'CHANGED'}"
        for name, one in outcomes.items()
    ]
    lines += ["", "what was said"]
    for name, counted in (*((name, one.outcomes) for name, one in outcomes.items()), ("in bulk", tally.outcomes)):
        lines += _said(name, counted) if counted else []
    failures = [f"{name}: hang at {one}" for name, outcome in outcomes.items() for one in outcome.hangs]
    failures += [
        f"{name}: honest {one}"
        for name, outcome in outcomes.items()
        for one in (*outcome.honest["wrong"], *outcome.honest["lost"])
    ]
    failures += [f"crash at {one}" for one in tally.crashes] + [f"hang at {one}" for one in tally.hangs]
    failures += [f"wrong at {one}" for one in tally.wrong]
    lines += ["", *(failures or ["nothing went wrong"])]
    return "\n".join(line[:WIDTH] for line in lines)


def _row(name: str, frames: int, read: int, seconds: float, crashes: int, hangs: int, wrong: int, honest: int,
         slowest: float) -> str:  # fmt: skip
    cells = (f"{frames:,}", f"{read:,}", f"{seconds:.0f}", crashes, hangs, wrong, f"{honest:,}", f"{slowest:.1f} s")
    return ROW.format(name, *cells)


def _said(name: str, counted: Counter[str]) -> list[str]:
    """The counts of one part, in lines."""
    lines, line = [], f"  {name:<18}"
    for reported, count in counted.most_common():
        entry = f"{reported} {count:,}; "
        if len(line) + len(entry) > WIDTH:
            lines.append(line)
            line = " " * 20
        line += entry
    return [*lines, line.rstrip("; ")]
