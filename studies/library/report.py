"""The records of a sweep as a table by family, a list of what was not exact, and a summary to keep."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Any

OUTCOMES = ("exact", "refused", "late", "wrong", "error")
Records = dict[str, dict[str, Any]]


def outcomes(record: dict[str, Any]) -> Counter[str]:
    """How many cuts of a model came out how. A model that could not be planned counts as one cut."""
    return Counter(cut["outcome"] for cut in record["cuts"].values())


def counted(record: dict[str, Any]) -> bool:
    """Whether the model is one by whose cuts the engine is judged: it runs, and gives the same answer again."""
    return bool(record["cuts"] or record["status"] != "unusable") and not record.get("stateful")


def summary(records: Records) -> dict[str, Any]:
    """Counts by family, what was not exact by cause."""
    families: dict[str, Any] = {}
    for family in sorted({record["family"] for record in records.values()}):
        mine = [record for record in records.values() if record["family"] == family]
        judged = [record for record in mine if counted(record)]
        cuts = sum((outcomes(record) for record in judged), Counter())
        looked = sum(record.get("refused_layers", {}).get("looked_at", 0) for record in judged)
        refused = sum(sum(record.get("refused_layers", {}).get("reasons", {}).values()) for record in judged)
        families[family] = {
            "tried": len(mine),
            "unusable": sum(record["status"] == "unusable" for record in mine),
            "stateful": sum(bool(record.get("stateful")) for record in mine),
            "timeout": sum(record["status"] == "timeout" for record in mine),
            "crash": sum(record["status"] == "crash" for record in mine),
            "judged": len(judged),
            "with_cuts": sum(bool(record["cuts"]) for record in judged),
            "cut_short": sum(bool(record.get("out_of_time")) for record in judged),
            "all_exact": sum(set(outcomes(record)) == {"exact"} and record["status"] == "ran" for record in judged),
            "cuts": {name: cuts[name] for name in OUTCOMES},
            "layers": {"looked_at": looked, "refused": refused},
            "engines": dict(Counter(record.get("engine", "") for record in judged)),
        }
    return families


def causes(records: Records) -> dict[str, list[str]]:
    """Not exact, grouped by outcome and by the message without its names and numbers; the models of each."""
    found: dict[str, list[str]] = defaultdict(list)
    for key, record in records.items():
        if not counted(record):
            continue
        if record["status"] in ("timeout", "crash"):
            where = f"at cut {record['at']}" if record.get("at") else "elsewhere"
            found[f"{record['status']} {record.get('exit_code', '')}"].append(f"{key} {where}")
        seen = set()
        for cut, facts in record["cuts"].items():
            if facts["outcome"] == "exact":
                continue
            cause = f"{facts['outcome']}: {_general(facts['why'])} @ {facts.get('at', '')}"
            if cause not in seen:
                seen.add(cause)
                found[cause].append(f"{key} [{record.get('label', '')}] cut {cut}, input {facts.get('input', 0)}")
    return dict(sorted(found.items(), key=lambda entry: -len(entry[1])))


def _general(text: str) -> str:
    text = re.sub(r"cannot cut after [^:]*:", "cannot cut:", text)
    text = re.sub(r"after layer \d+ \([^()]*\)", "after a layer", text)
    text = re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?(e[-+]?\d+)?", "N", text)
    return re.sub(r"(N, )+N", "N..", text)[:220]


def kept(records: Records) -> dict[str, Any]:
    """What is worth keeping of a sweep: counts, the models of each cause, and why layers are refused."""
    reasons: Counter[str] = Counter()
    for record in records.values():
        if counted(record):
            reasons.update(record.get("refused_layers", {}).get("reasons", {}))
    found = {cause: [place.partition(" [")[0] for place in where] for cause, where in causes(records).items()}
    return {"families": summary(records), "not_exact": found, "refused_layers": dict(reasons.most_common())}


def table(families: dict[str, Any]) -> str:
    """One line a family."""
    heads = ["family", "tried", "unusable", "stateful", "judged", "all exact", *OUTCOMES, "layers", "refused layers"]
    rows = [heads]
    for family, facts in families.items():
        columns = [family, facts["tried"], facts["unusable"], facts["stateful"], facts["judged"], facts["all_exact"]]
        columns += [facts["cuts"][name] for name in OUTCOMES]
        columns += [facts["layers"]["looked_at"], facts["layers"]["refused"]]
        rows.append([str(column) for column in columns])
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
