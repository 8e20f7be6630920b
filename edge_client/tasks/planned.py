"""What a plan says: every candidate, the decision, and what both are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_client.load import Load
from edge_client.planning.calibration import Calibration
from edge_client.planning.candidate import STAGES, Candidate
from edge_client.planning.explain import BreakEven, explain
from edge_client.planning.link import Link
from edge_client.planning.objective import Constraints, Decision
from edge_client.planning.predict import Power
from edge_client.screen.table import table
from edge_client.screen.text import one_line, printable, size
from edge_client.tasks.tabular import Row, Tabular
from shared_hooks.profiling.profile import Profile

NAME_WIDTH = 26


@dataclass(frozen=True, repr=False)
class Planned(Tabular):
    """`edge_client.plan` returns it. A row is a candidate, in the order of the layers; times in ns.

    ``candidates``: what every way to run a request would take; ``decision``: which is best (`best` is its name), and
    the ranking; ``edge`` and ``cloud``: both sides' profiles; ``link`` and ``load``: as they were probed; ``breaks``:
    what would have to change for the runner-up to win; ``warnings``: what makes all this less sure.
    """

    model: str
    decision: Decision
    candidates: Sequence[Candidate]
    constraints: Constraints
    edge: Profile
    cloud: Profile
    link: Link
    load: Load
    calibration: Calibration | None
    power: Power | None
    breaks: Sequence[BreakEven]
    server_is_ours: bool
    warnings: Sequence[str]

    shown = {  # noqa: RUF012
        "best": "best",
        "name": "cut after",
        "latency_ns": "ms",
        "edge_ns": "edge",
        "network_ns": "network",
        "tail_ns": "server",
        "bytes_up": "bytes up",
        "edge_memory_bytes": "edge memory",
        "reason": "not allowed",
    }

    drawn = "latency_ns"

    @property
    def best(self) -> str:
        """The winner's name, which is what `split` of an `EdgeClient` takes."""
        return self.decision.winner.name

    def title(self) -> str:
        winner = self.decision.winner
        return (
            f"{self.model}: {winner.name} is best in {self.decision.objective} of {len(self.candidates)} candidates, "
            f"{winner.latency_ns / 1e6:.3f} ms predicted"
        )

    def rows(self) -> list[Row]:
        rank = {one.name: number for number, one in enumerate(self.decision.ranking, 1)}
        return [
            {
                "name": one.name,
                "layer_id": one.layer_id,
                "rank": rank.get(one.name),
                "best": one.name == self.best,
                "latency_ns": one.latency_ns,
                **{f"{stage}_ns": one.stages_ns.get(stage, 0.0) for stage in STAGES},
                "bytes_up": one.bytes_up,
                "bytes_down": one.bytes_down,
                "edge_memory_bytes": one.edge_memory.value,
                "edge_energy_j": one.edge_energy.value,
                "edge_energy_status": one.edge_energy.status,
                "requests_per_second": one.throughput,
                "accuracy": one.accuracy,
                "allowed": one.name not in self.decision.rejected,
                "reason": self.decision.rejected.get(one.name),
            }
            for one in self.candidates
        ]

    def explain(self) -> str:
        """Why the winner wins, stage by stage, and what would have to change for the runner-up to win."""
        return self._explained()[0]

    def _explained(self) -> tuple[str, dict[str, Any]]:
        return explain(self.decision, self.candidates, self.breaks)

    def as_dict(self, explanation: bool = False) -> dict[str, Any]:
        """JSON-able: all that docs/planning.md names."""
        constraints, power, load = self.constraints, self.power, self.load
        return {
            "model": self.model,
            "decision": self.decision.as_dict(),
            "candidates": [
                {
                    **one.as_dict(),
                    "allowed": one.name not in self.decision.rejected,
                    "reason": self.decision.rejected.get(one.name, ""),
                }
                for one in self.candidates
            ],
            "constraints": {
                "max_edge_memory": constraints.max_edge_memory,
                "max_bytes_per_second": constraints.max_bytes_per_second,
                "rate": constraints.rate,
                "min_accuracy": constraints.min_accuracy,
            },
            "link": self.link.as_dict(),
            "load": {"pending": load.pending, "workers": load.workers, "queue_ns": load.queue_ns},
            "calibration": self.calibration.as_dict() if self.calibration else None,
            "power": {"active": power.active, "idle": power.idle} if power else None,
            "edge_machine": dict(self.edge.machine),
            "cloud_machine": dict(self.cloud.machine),
            "server_is_ours": self.server_is_ours,
            "warnings": list(self.warnings),
            **({"explanation": self._explained()[1]} if explanation else {}),
        }

    def text(self, top: int | None = None) -> str:
        """As the command prints it; of all candidates the best ``top``."""
        shown = list(self.candidates)
        if top is not None:
            best = {one.name for one in self.decision.ranking[:top]}
            shown = [one for one in shown if one.name in best]
        energy = any(one.edge_energy.value is not None for one in self.candidates)
        headers = ["", "cut after", "ms", "edge", "net", "server", "up", "memory", *(["mJ"] if energy else [])]
        rows = [self._cells(one, energy) for one in shown]
        return "\n".join([table(headers, rows, right=range(2, len(headers))), "", *self._below(len(shown), energy)])

    def _cells(self, one: Candidate, energy: bool) -> list[str]:
        stages = one.stages_ns
        edge = sum(stages.get(stage, 0.0) for stage in ("prepare", "edge", "encode", "finish"))
        server = sum(stages.get(stage, 0.0) for stage in ("queue", "tail"))
        mark = "*" if one is self.decision.winner else "x" if one.name in self.decision.rejected else ""
        joules, memory = one.edge_energy.value, one.edge_memory.value
        return [
            mark,
            _short(printable(one.name)),
            *(f"{ns / 1e6:.2f}" for ns in (one.latency_ns, edge, stages.get("network", 0.0), server)),
            size(one.bytes_up),
            "-" if memory is None else size(round(memory)),
            *(["-" if joules is None else f"{joules * 1e3:.1f}"] if energy else []),
        ]

    def _below(self, shown: int, energy: bool) -> list[str]:
        decision, lines = self.decision, []
        if shown < len(self.candidates):
            lines.append(f"the best {shown} of {len(self.candidates)} candidates")
        lines.append(f"{self.model}: {decision.winner.name} is best in {decision.objective} (*)")
        if decision.runner_up:
            lines.append(f"runner-up: {decision.runner_up.name}")
        if decision.rejected:
            lines.append(f"not allowed (x): {len(decision.rejected)} of {len(self.candidates)} candidates")
        lines.append(f"link, {self.link.source}: {self.link.rtt_ns / 1e6:.3f} ms round trip")
        lines.append(f"up: {self.link.speed_up}")
        for side, profile in (("edge", self.edge), ("cloud", self.cloud)):
            lines.append(f"{side}: {_machine(profile.machine)}")
        if not energy and self.candidates:
            lines.append(f"no energy: {one_line(self.candidates[0].edge_energy.note)}")
        return lines


def _machine(machine: Mapping[str, Any]) -> str:
    return printable(str(machine.get("name", "?")))


def _short(name: str) -> str:
    """The end of a long name tells more than its beginning."""
    return name if len(name) <= NAME_WIDTH else f"…{name[-NAME_WIDTH + 1 :]}"
