"""Records as tables: outcomes by list of classes, by mode, and what was not equal by cause."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from studies.generation.cases import DIFFERENT, EQUAL, NOT_COUNTED, REFUSED

Records = dict[str, dict[str, Any]]
CRASH = "crash"
"""A process that ended or hung: what it was at is a case of its own."""
VERDICTS = ("equal", "refused", "different", "failed", "not counted")


def cases(record: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The cases of a record, and where its process was lost if it was."""
    yield from record["cases"].items()
    if record["status"] in ("crash", "timeout") and record.get("at"):
        yield record["at"], {"outcome": CRASH, "why": f"{record['status']} {record.get('exit_code', '')}".strip()}


def verdict(record: dict[str, Any]) -> str:
    """Return an architecture's worst verdict; "not counted" where it does not generate by itself."""
    counted = {facts["outcome"] for _, facts in cases(record)} - set(NOT_COUNTED)
    if not counted:
        return "not counted"
    for outcome, name in ((DIFFERENT, "different"), (REFUSED, "refused"), (EQUAL, "equal")):
        if outcome in counted and (counted <= {EQUAL, REFUSED} or outcome == DIFFERENT):
            return name
    return "failed"


def summary(records: Records) -> dict[str, Any]:
    """Counts of architectures by list, and of cases."""
    names = sorted({name for record in records.values() for name in record["lists"]})
    found: dict[str, Any] = {}
    for name in [*names, "all"]:
        mine = [record for record in records.values() if name == "all" or name in record["lists"]]
        verdicts = Counter(verdict(record) for record in mine)
        outcomes = Counter(facts["outcome"] for record in mine for _, facts in cases(record))
        found[name] = {
            "classes": len(mine),
            "built": sum("label" in record for record in mine),
            "counted": len(mine) - verdicts["not counted"],
            **{one: verdicts[one] for one in VERDICTS[:-1]},
            "few_tokens": sum(record.get("distinct", 8) < 8 for record in mine),
            "cases": dict(outcomes),
        }
    return found


def table(found: dict[str, Any]) -> str:
    """One line a list."""
    heads = ["list", "classes", "built", "counted", *VERDICTS[:-1], "cases"]
    rows = [heads]
    for name, facts in found.items():
        reported = ", ".join(f"{count} {outcome}" for outcome, count in sorted(facts["cases"].items()))
        rows.append([name, *(str(facts[head]) for head in heads[1:-1]), reported])
    return aligned(rows)


def counts(records: Records) -> dict[str, dict[str, int]]:
    """By case, over all records: how many came out how."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records.values():
        for case, facts in cases(record):
            found[case][facts["outcome"]] += 1
    return {case: dict(counted) for case, counted in found.items()}


def by_case(records: Records) -> str:
    """A line a case."""
    found = counts(records)
    outcomes = sorted({outcome for counted in found.values() for outcome in counted})
    rows = [["case", *outcomes]]
    rows += [[case, *(str(counted.get(outcome, "")) for outcome in outcomes)] for case, counted in found.items()]
    return aligned(rows)


def causes(records: Records) -> dict[str, list[str]]:
    """What was not equal, by outcome and message without its numbers; the records and cases of each."""
    found: dict[str, list[str]] = defaultdict(list)
    for key, record in records.items():
        if not any(True for _ in cases(record)):
            found[f"{record['status']}: {_general(record.get('why', ''))}"].append(key)
        seen = set()
        for case, facts in cases(record):
            cause = f"{facts['outcome']}: {_general(facts.get('why', ''))}"
            if facts["outcome"] != EQUAL and cause not in seen:
                seen.add(cause)
                found[cause].append(f"{key} [{case}] {facts.get('at', '')}".strip())
    return dict(sorted(found.items(), key=lambda entry: (-len(entry[1]), entry[0])))


def kept(records: Records) -> dict[str, Any]:
    """What is worth keeping of a run: counts, and the classes and cases of each cause."""
    return {"classes": summary(records), "cases": counts(records), "not_equal": causes(records)}


def _general(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?(e[-+]?\d+)?", "N", text)[:200]


def aligned(rows: list[list[str]]) -> str:
    """Columns side by side."""
    widths = [max(len(row[number]) for row in rows) for number in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def reported(record: dict[str, Any]) -> str:
    """A record in some words: how many cases came out how."""
    counts = Counter(facts["outcome"] for _, facts in cases(record))
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or str(record.get("why", ""))[:150]
