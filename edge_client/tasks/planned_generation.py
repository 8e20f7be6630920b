"""What a plan of a generation says: every cut, the decision, and what both are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edge_client.planning.explain import BreakEven, explain
from edge_client.planning.generation.measured import KEY, Measured
from edge_client.planning.generation.predict import GenerationCandidate
from edge_client.planning.generation.workload import Workload
from edge_client.planning.link import Link
from edge_client.planning.objective import Decision
from edge_client.screen.table import Column, fitted
from edge_client.screen.text import printable, size
from edge_client.tasks.tabular import Row, Tabular


@dataclass(frozen=True, repr=False)
class PlannedGeneration(Tabular):
    """`edge_client.plan_generation` returns it. A row is a cut, in the order of the blocks; times in ns, bytes a token.

    ``goal``: what is to be best, a token, the first one, or the reply; ``decision``: which is (`best`, `best_cut`);
    ``measured``: what it is made of; ``link``: the one it is for; ``origin``: where the numbers come from.
    """

    model: str
    goal: str
    workload: Workload
    decision: Decision
    candidates: Sequence[GenerationCandidate]
    measured: Measured
    link: Link
    origin: str
    breaks: Sequence[BreakEven]

    shown = {  # noqa: RUF012
        "best": "best",
        "name": "cut after",
        "token_ns": "ms a token",
        "first_token_ns": "ms to the first",
        "reply_ns": "ms a reply",
        "edge_ns": "edge",
        "network_ns": "network",
        "server_ns": "server",
        "bytes_up": "bytes up",
        "edge_memory_bytes": "edge memory",
        "reason": "not allowed",
    }

    drawn = "token_ns"

    @property
    def best(self) -> str:
        """The winner's name: "edge-only" or a block."""
        return self.decision.winner.name

    @property
    def best_cut(self) -> str | None:
        """The best block to cut after, whether it is the winner or not; None where no cut is allowed."""
        return self.decision.best_cut.name if self.decision.best_cut else None

    def title(self) -> str:
        winner = next(one for one in self.candidates if one.name == self.best)
        return (
            f"{self.model}: {winner.name} is best in {self.decision.objective} of {self._of}, "
            f"{winner.token.latency_ns / 1e6:.3f} ms a token predicted"
        )

    @property
    def _of(self) -> str:
        return {"token": "a token", "first-token": "the first token", "reply": "a reply"}[self.goal]

    def rows(self) -> list[Row]:
        rank = {one.name: number for number, one in enumerate(self.decision.ranking, 1)}
        return [
            {
                "name": one.name,
                "block": one.token.layer_id,
                "rank": rank.get(one.name),
                "best": one.name == self.best,
                "token_ns": one.token.latency_ns,
                "first_token_ns": one.first.latency_ns,
                "reply_ns": one.reply.latency_ns,
                "tokens_per_second": one.tokens_per_second,
                "tokens_per_round": one.tokens_per_round,
                "edge_ns": one.token.stages_ns["edge"],
                "network_ns": one.token.stages_ns.get("network", 0.0),
                "server_ns": one.token.stages_ns.get("queue", 0.0) + one.token.stages_ns.get("tail", 0.0),
                "bytes_up": one.token.bytes_up,
                "bytes_down": one.token.bytes_down,
                "first_bytes_up": one.first.bytes_up,
                "edge_memory_bytes": one.token.edge_memory.value,
                "edge_state_bytes": one.edge_state_bytes,
                "cloud_memory_bytes": one.cloud_weights_bytes + one.cloud_state_bytes,
                "cloud_state_bytes": one.cloud_state_bytes,
                "edge_energy_j": one.token.edge_energy.value,
                "allowed": one.name not in self.decision.rejected,
                "reason": self.decision.rejected.get(one.name),
            }
            for one in self.candidates
        ]

    def explain(self) -> str:
        """Why the winner wins, and what would have to change for the runner-up to win."""
        return self._explained()[0]

    def _explained(self) -> tuple[str, dict[str, Any]]:
        return explain(self.decision, [one.of(self.goal) for one in self.candidates], self.breaks)

    def as_dict(self, explanation: bool = False) -> dict[str, Any]:
        """JSON-able. ``measured`` in it can be planned with again."""
        drafting, answer = self.workload.drafting, self.workload.answer
        return {
            "model": self.model,
            "goal": self.goal,
            "workload": {
                "prompt_tokens": self.workload.prompt_tokens,
                "new_tokens": self.workload.new_tokens,
                "top_logits": answer[1] if answer is not None and len(answer) == 2 else None,
                "draft": drafting.tokens,
                "acceptance": drafting.acceptance if drafting.tokens else None,
            },
            "decision": self.decision.as_dict(),
            "candidates": self.rows(),
            "link": self.link.as_dict(),
            "origin": self.origin,
            KEY: self.measured.as_dict(),
            **({"explanation": self._explained()[1]} if explanation else {}),
        }

    def text(self, top: int | None = None, width: int | None = None) -> str:
        """As the command prints it, in the order of the blocks; of all cuts the best ``top``, the best first."""
        known = {row["name"]: row for row in self.rows()}
        names = list(known) if top is None else [one.name for one in self.decision.ranking[:top]]
        spare = ("server memory", "memory", "down", "up", "server", "net", "edge", "tokens/s")
        found = fitted(self._columns([known[name] for name in names]), spare, width)
        return "\n".join([found, "", *self.below(len(names))])

    def _columns(self, rows: Sequence[Row]) -> list[Column]:
        def ms(key: str, digits: int = 2) -> list[str]:
            return [f"{row[key] / 1e6:.{digits}f}" for row in rows]

        def sizes(key: str) -> list[str]:
            return [size(round(row[key])) for row in rows]

        marks = ["*" if row["best"] else "" if row["allowed"] else "x" for row in rows]
        return [
            Column("", marks, right=False),
            Column("cut after", [printable(row["name"]) for row in rows], right=False),
            Column("ms a token", ms("token_ns")),
            Column("tokens/s", [f"{row['tokens_per_second']:.1f}" for row in rows]),
            Column("ms to first", ms("first_token_ns", 1)),
            Column("edge", ms("edge_ns")),
            Column("net", ms("network_ns")),
            Column("server", ms("server_ns")),
            Column("up", sizes("bytes_up")),
            Column("down", sizes("bytes_down")),
            Column("memory", sizes("edge_memory_bytes")),
            Column("server memory", sizes("cloud_memory_bytes")),
        ]

    def below(self, shown: int | None = None) -> list[str]:
        """What is said below the table, of which so many candidates are ``shown`` (None: all)."""
        shown = len(self.candidates) if shown is None else shown
        decision, work, lines = self.decision, self.workload, []
        if shown < len(self.candidates):
            lines.append(f"the best {shown} of {len(self.candidates)} candidates, the best first")
        lines.append(f"{self.model}: {self.best} is best in {decision.objective} of {self._of} (*)")
        if decision.runner_up:
            lines.append(f"runner-up: {decision.runner_up.name}")
        if decision.best_cut is None:
            lines.append("best cut: none is allowed")
        elif decision.best_cut is not decision.winner:
            lines.append(f"best cut: {decision.best_cut.name}")
        if decision.rejected:
            lines.append(f"not allowed (x): {len(decision.rejected)} of {len(self.candidates)} candidates")
        lines.append(f"{work.new_tokens} tokens after {work.prompt_tokens}; bytes are of a token, memory is at the end")
        if work.drafting.tokens:
            lines.append(
                f"{work.drafting.tokens} drafted a round trip, {work.drafting.acceptance:.0%} accepted: "
                f"{work.drafting.tokens_per_round:.2f} tokens a round trip"
            )
        lines.append(f"link, {self.link.source}: {self.link.rtt_ns / 1e6:.3f} ms round trip; up: {self.link.speed_up}")
        lines.append(f"{self.origin}; the server's blocks: {self.measured.cloud.note or 'each measured'}")
        if work.prompt_tokens + work.new_tokens > 2 * max(self.measured.edge.lengths, default=0):
            most = max(self.measured.edge.lengths, default=0)
            lines.append(f"measured up to {most} tokens only: what is beyond is drawn out by a line")
        return lines
