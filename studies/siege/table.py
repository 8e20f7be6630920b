"""What came of a siege, as a table of at most 120 columns, and below it what was reported and what falls short."""

from __future__ import annotations

from collections.abc import Sequence

from studies.siege.trial import AFTER, BEFORE, DURING, Outcome

ROW = "{:<24}{:>8}{:>9}{:>7}{:>7}{:>7}{:>7}{:>6}{:>7}{:>14}{:>9}{:>8}  {}"
WIDTH = 120


def table(outcomes: Sequence[Outcome]) -> str:
    """A row a case."""
    head = ROW.format(
        "case", "p50 ms", "p99 ms", "p50 x", "p99 x", "after x", "errors", "wrong", "asked", "MiB / allowed", "log B",
        "drain s", "",
    )  # fmt: skip
    lines = [head, "-" * WIDTH]
    for one in outcomes:
        before, during, after = (one.phases[name] for name in (BEFORE, DURING, AFTER))
        errors = sum(during.errors.values()) + sum(after.errors.values())
        lines.append(
            ROW.format(
                one.case, before.p50, before.p99, one.ratio("p50"), one.ratio("p99"), one.ratio("p99", AFTER), errors,
                during.wrong + after.wrong, during.asked, f"{one.peak:.0f} / {one.allowed:.0f}", one.log_bytes,
                round(one.drain_seconds, 1), "ok" if not one.faults else "FALLS",
            )
        )  # fmt: skip
    lines += ["", "what was reported (times), and what falls short"]
    for one in outcomes:
        lines.append(f"{one.case} ({one.who}): {one.does}")
        lines += [f"    {count:>8} x {text}"[:WIDTH] for text, count in one.reported[:4]]
        lines += [f"    FALLS: {fault}"[:WIDTH] for fault in one.faults]
    return "\n".join(lines)
