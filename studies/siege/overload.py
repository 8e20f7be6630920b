"""Demand beyond what the server can do, and fifty clients of mixed sizes.

*Overload*: what three honest identities get done alone, asking without a pause, is the capacity. Then a hostile one
asks besides, for as much as brings the demand to five times that. *Crowd*: fifty clients of four sizes in five
processes, each asking without a pause; how evenly the server answers them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from studies.siege.processes import Child, Server
from studies.siege.trial import BEFORE, DURING, OTHER, Phase, Siege, Who

FLOOD = "paced-flood"
ROWS = 16
"""Rows of each honest input: the server's work is the bottleneck, not the clients'."""
THREADS = 4
"""Threads of each honest identity."""
TIMES = 5.0
DEADLINE = 10.0
"""Seconds that an honest request may take."""
GOODPUT = 0.8
SIZES = (1, 4, 16, 48)
"""Rows of an input, of clients in turn."""
CROWD, PROCESSES = 50, 5
UNEVEN = 0.2


@dataclass
class Overload:
    """Answers a second, of honest identities: alone, and beside the hostile one. Memory in MiB."""

    who: str
    capacity: float = 0.0
    goodput: float = 0.0
    each: list[float] = field(default_factory=list)
    offered: float = 0.0
    phases: dict[str, Phase] = field(default_factory=dict)
    reported: list[tuple[str, int]] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    processor: tuple[float, float] = (0.0, 0.0)
    """Processors that the server had, on the mean: alone, beside the hostile one. On a busy machine it gets fewer."""
    before: float = 0.0
    peak: float = 0.0
    last: float = 0.0
    status: int | None = None

    @property
    def share(self) -> float:
        """The share of the capacity that honest identities get."""
        return round(self.goodput / max(self.capacity, 1e-9), 3)

    @property
    def faults(self) -> list[str]:
        during = self.phases[DURING]
        found = [] if self.share >= GOODPUT else [f"honest goodput is {self.share} of the capacity"]
        found += [f"{during.wrong} wrong answers"] if during.wrong else []
        found += [f"{count} x {text}" for text, count in during.errors.items()]
        found += [f"p99 {during.p99} ms, beyond the deadline"] if during.p99 > 1000 * DEADLINE else []
        found += [f"exit status {self.status}"] if self.status else []
        return found

    def json(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share, "faults": self.faults}

    def __str__(self) -> str:
        during = self.phases[DURING]
        return "\n".join(
            [
                f"capacity {self.capacity:.1f}/s by three honest identities; beside a hostile one ({self.who}) that "
                f"offers {self.offered:.0f}/s they get {self.goodput:.1f}/s: {self.share} ({self.each})",
                f"their p50 {during.p50} ms, p99 {during.p99} ms; memory {self.before:.0f}, at most {self.peak:.0f}, "
                f"at last {self.last:.0f} MiB; processors of the server: {self.processor[0]}, then {self.processor[1]}",
                *(f"    {count:>8} x {text}"[:120] for text, count in self.reported[:4]),
                *(f"    FALLS: {fault}" for fault in self.faults),
            ]
        )


def overload(siege: Siege, who: Who = OTHER, seconds: float = 15.0) -> Overload:
    """Three honest identities alone, then beside a hostile one."""
    server = Server(siege.folder / "overload", siege.tables(who, {}), who.options)
    result, hostile = Overload(who.name), None
    clients = [{"rows": ROWS, "pause": 0.0, "cuts": ["input"], "threads": THREADS, "deadline": DEADLINE}]
    try:
        siege.begin(server.address, who, clients)
        time.sleep(2)
        began, used = time.monotonic(), server.cpu_seconds
        siege.all({"phase": BEFORE})
        time.sleep(seconds)
        alone = (server.cpu_seconds - used) / (time.monotonic() - began)
        result.before = round(server.resident(), 1)
        siege.all({"phase": "between"})
        result.capacity = sum(siege.all({"count": BEFORE})) / (time.monotonic() - began)
        result.offered = (TIMES - 1) * result.capacity
        hostile = siege.hostile(FLOOD, server.address, who, seconds + 2, "--rate", str(result.offered))
        hostile.say("go")
        time.sleep(2)
        started, used = time.monotonic(), server.cpu_seconds
        siege.all({"phase": DURING})
        time.sleep(seconds)
        beside = (server.cpu_seconds - used) / (time.monotonic() - started)
        result.processor = (round(alone, 2), round(beside, 2))
        reports = siege.all({"end": True})
        took = time.monotonic() - started
        result.peak, result.last = round(server.peak(started), 1), round(server.resident(), 1)
        reported = hostile.heard()
        result.sent, result.reported = reported["sent"], [tuple(each) for each in reported["reported"]]
        flat = [report for each in reports for report in each]
        result.phases = {name: Phase.of([report.get(name, {}) for report in flat]) for name in (BEFORE, DURING)}
        counted = [sum(len(one.get(DURING, {}).get("seconds", ())) for one in each) for each in reports]
        result.each = [round(count / took, 1) for count in counted]
        result.goodput = sum(result.each)
    finally:
        if hostile is not None:
            hostile.kill()
        result.status, _ = server.drain()
    return result


@dataclass
class Crowd:
    """Answers of each client, by the rows of its inputs. Those of one size are compared with each other: one that asks
    for more work at a time gets as much time, and so fewer answers.
    """

    counts: dict[int, list[int]] = field(default_factory=dict)
    wrong: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    status: int | None = None

    @staticmethod
    def uneven(counts: Sequence[int]) -> float:
        """How far the one furthest from the mean is from it."""
        mean = sum(counts) / max(len(counts), 1)
        return round(max((abs(count - mean) for count in counts), default=0.0) / max(mean, 1e-9), 3)

    @property
    def faults(self) -> list[str]:
        found = [f"{self.wrong} wrong answers"] if self.wrong else []
        found += [f"{count} x {text}" for text, count in self.errors.items()]
        for rows, counts in sorted(self.counts.items()):
            apart = self.uneven(counts)
            found += [f"{rows} rows: a client is {apart} from the mean"] if apart > UNEVEN else []
        found += [f"exit status {self.status}"] if self.status else []
        return found

    def json(self) -> dict[str, Any]:
        every = [count for counts in self.counts.values() for count in counts]
        return {**asdict(self), "uneven": self.uneven(every), "faults": self.faults}

    def __str__(self) -> str:
        every = [count for counts in self.counts.values() for count in counts]
        lines = [f"{len(every)} clients, {sum(every)} answers in {self.seconds:.0f} s, {self.wrong} wrong; "
                 f"uneven by {self.uneven(every)}"]  # fmt: skip
        for rows, counts in sorted(self.counts.items()):
            lines.append(f"    {rows:>3} rows: {min(counts)} to {max(counts)} answers, uneven by {self.uneven(counts)}")
        return "\n".join([*lines, *(f"    FALLS: {fault}" for fault in self.faults)])


def crowd(siege: Siege, who: Who = OTHER, seconds: float = 90.0, clients: int = CROWD) -> Crowd:
    """Fifty clients; with tokens in ``who``, each an identity of its own."""
    server = Server(siege.folder / "crowd", siege.tables(who, {}), who.options)
    processes = [Child("studies.siege.honest", str(10 + number)) for number in range(PROCESSES)]
    result = Crowd()
    tokens = who.honest if len(who.honest) >= clients else ("",) * clients
    try:
        for child in processes:
            child.heard()
        for number, child in enumerate(processes):
            mine = range(number, clients, PROCESSES)
            asking = {"pause": 0.0, "cuts": ["input"]}
            mixed = [{**asking, "rows": SIZES[k % len(SIZES)], "token": tokens[k]} for k in mine]
            child.say({"begin": server.address, "clients": mixed})
        for child in processes:
            child.heard()
        time.sleep(2)
        began = time.monotonic()
        for child in processes:
            child.ask({"phase": DURING})
        time.sleep(seconds)
        for child in processes:
            child.say({"phase": "late"})
        for child in processes:
            child.heard()
        result.seconds = time.monotonic() - began
        for child in processes:
            child.say({"end": True})
        for number, child in enumerate(processes):
            for k, report in zip(range(number, clients, PROCESSES), child.heard(), strict=True):
                seen = Phase.of([report.get(DURING, {})])
                result.counts.setdefault(SIZES[k % len(SIZES)], []).append(seen.asked)
                result.wrong += seen.wrong
                for text, count in seen.errors.items():
                    result.errors[text] = result.errors.get(text, 0) + count
    finally:
        for child in processes:
            child.close()
        result.status, _ = server.drain()
    return result
