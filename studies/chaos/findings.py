"""What a run came to, by kind of fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from edge_client.transport.connection import BEATS
from studies.chaos.crowd import Known
from studies.chaos.faults import OTHER_WEIGHTS

COUNTS = ("times", "asked", "lost", "wrong", "sent_again", "refused_by_name", "instead")
HEARTBEAT = 1.0  # seconds: what a client asks for
DETECTION_SECONDS = HEARTBEAT * (BEATS + 0.5)
"""Until a silent server is noticed: the missing beats, and how often a client looks."""
BOUND_SECONDS = DETECTION_SECONDS + 1


@dataclass(frozen=True)
class Episode:
    """A fault, from before it to the moment when everybody had been served after it (seconds of the shared clock)."""

    fault: str
    began: float
    healed: float
    over: float


def computed_twice(computed: Path, known: Iterable[Known]) -> list[str]:
    """Requests that one server process computed twice, or that were computed twice and say that they were sent once.

    Another process cannot know what one that was killed had computed: the client reports it (``sends``).
    """
    lines = computed.read_text().split("\n")[:-1] if computed.exists() else []
    in_process = Counter(lines)
    anywhere = Counter(line.partition(" ")[2] for line in lines)
    sends = {f"{one['client']} {one['id']}": one["sends"] for one in known if "id" in one}
    return sorted(
        {line.partition(" ")[2] for line, count in in_process.items() if count > 1}
        | {name for name, count in anywhere.items() if count > 1 and sends.get(name) == 1}
    )


def without_service(known: Sequence[Known], episode: Episode) -> list[float]:
    """For each client, the longest time between two of its answers that lies after the fault was healed, in seconds."""
    found = []
    for client in {one["client"] for one in known}:
        answered = sorted(one["answered"] for one in known if one["client"] == client and one["came"] == "ok")
        if not answered or answered[0] > episode.began:  # it came later
            continue
        times = [time for time in answered if episode.healed < time <= episode.over]
        if times:
            found.append(max(b - a for a, b in zip([episode.healed, *times], times, strict=False)))
    return found


def row(fault: str, episodes: Sequence[Episode], known: Sequence[Known]) -> dict[str, Any]:
    """One kind of fault."""
    asked = [one for one in known if any(e.began <= one["asked"] < e.over for e in episodes)]
    by_kind: dict[str, list[float]] = {"fixed": [], "auto": []}
    for episode in episodes:
        near = [one for one in known if one["asked"] < episode.over and one["answered"] > episode.began - 60]
        for name in by_kind:
            by_kind[name] += without_service([x for x in near if _group(x["kind"]) == name], episode)
    lost = [one for one in asked if one["came"] not in ("ok", "wrong") and not refused_by_name(one, episodes)]
    return {
        "fault": fault,
        "times": len(episodes),
        "asked": len(asked),
        "refused_by_name": sum(refused_by_name(one, episodes) for one in known),
        "instead": sum(bool(one.get("instead")) for one in asked),
        "lost": len(lost),
        "lost_by": dict(Counter(one["came"] for one in lost)),
        "why": [one["why"] for one in lost[:3]],
        "wrong": sum(one["came"] == "wrong" for one in asked),
        "sent_again": sum(one.get("sends", 1) > 1 for one in asked),
        **{
            f"{name}_{what}": round(function(values), 2) if values else None
            for name, values in by_kind.items()
            for what, function in (("median", median), ("max", max))
        },
    }


def refused_by_name(one: Known, episodes: Sequence[Episode]) -> bool:
    """Whether a request heard that the server had other weights while it had, also one that was asked before."""
    those = [e for e in episodes if e.fault == OTHER_WEIGHTS]
    return one["came"] == "Disagreement" and any(one["answered"] >= e.began and one["asked"] < e.over for e in those)


def _group(kind: str) -> str:
    return kind if kind == "auto" else "fallback" if "+" in kind else "fixed"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| fault | times | asked | lost | wrong | sent again | refused by name | by the edge instead "
        "| fixed: median / max s | auto: median / max s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]

    def pair(one: dict[str, Any], name: str) -> str:
        middle, most = one[f"{name}_median"], one[f"{name}_max"]
        return "-" if most is None else f"{middle:.2f} / {most:.2f}"

    for one in rows:
        counts = " | ".join(f"{one[name]:,}" for name in COUNTS)
        lines.append(f"| {one['fault']} | {counts} | {pair(one, 'fixed')} | {pair(one, 'auto')} |")
    return "\n".join(lines)
