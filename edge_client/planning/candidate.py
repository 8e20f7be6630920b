"""One way to run a request: a cut, everything here, or everything there; and what is predicted of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from edge_client.modes import CLOUD_FILE
from shared_hooks.metrics import Reading
from shared_hooks.showing import short

STAGES: Final = ("prepare", "edge", "encode", "network", "queue", "tail", "finish")
"""Where a request's time goes, as a plan predicts it and a sweep measures it. prepare: reading and preprocessing the
input; edge: the head (or the whole model); encode: frontier to bytes; network: upload, download, both ways' latency;
queue: waiting for a worker; tail: the server's decode, inject, compute and encode; finish: the answer to tensors."""


OTHER_COSTS: Final = ("memory", "energy", "accuracy")


@short
@dataclass(frozen=True)
class Candidate:
    """A prediction. Times in ns, sizes in bytes, energy in joules."""

    name: str
    """EDGE_ONLY, CLOUD_ONLY, CLOUD_FILE, or the layer after which to cut: what ``--split`` takes."""
    layer_id: int | None
    stages_ns: Mapping[str, float]
    bytes_up: int
    bytes_down: int
    edge_energy: Reading
    edge_memory: Reading
    accuracy: float | None = 1.0
    """Agreement with the whole model's answer: 1.0 for what is exact, None when unknown."""
    throughput: float | None = None
    """Requests per second with several under way: what the slowest of edge, link (each way), workers lets through."""
    notes: tuple[str, ...] = field(default=())
    quartiles_ns: tuple[float, float] | None = None
    """Between which half of such requests would lie, by the spread of the times measured on both sides and of the
    probe's rounds; None where too few were measured.
    """

    codec: str = ""
    """What the frontier travels with, where codecs are chosen with the cut; empty: the one that all requests use."""

    last: bool = False
    """Whether no layer runs after it: there is nothing left for the server."""

    @property
    def key(self) -> str:
        """What makes it one of its kind: its name, with the codec where that is chosen, too."""
        return f"{self.name} + {self.codec}" if self.codec else self.name

    @property
    def is_cut(self) -> bool:
        """Whether both sides compute: after a layer that is not the last, not before the first."""
        return self.layer_id is not None and self.layer_id >= 0 and self.name != CLOUD_FILE and not self.last

    def as_near_as(self, other: Candidate) -> bool:
        """Whether the spreads of both overlap, so that either may turn out the faster one."""
        if self.quartiles_ns is None or other.quartiles_ns is None:
            return False
        return self.quartiles_ns[0] <= other.quartiles_ns[1] and other.quartiles_ns[0] <= self.quartiles_ns[1]

    @property
    def latency_ns(self) -> float:
        return sum(self.stages_ns.values())

    @property
    def server_ns(self) -> float:
        """What it takes of the server: not the waiting."""
        return self.stages_ns.get("tail", 0.0)

    def quartiles(self) -> dict[str, float | None]:
        """By the names they have in tables and JSON."""
        low, high = self.quartiles_ns or (None, None)
        return {"latency_q1_ns": low, "latency_q3_ns": high}

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "codec": self.codec or None,
            "layer_id": self.layer_id,
            "latency_ns": self.latency_ns,
            **self.quartiles(),
            "stages_ns": dict(self.stages_ns),
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "edge_energy": self.edge_energy.as_dict(),
            "edge_memory": self.edge_memory.as_dict(),
            "server_ns": self.server_ns,
            "accuracy": self.accuracy,
            "throughput": self.throughput,
            "notes": list(self.notes),
        }


def undominated(candidates: Sequence[Candidate], costs: Collection[str] = OTHER_COSTS) -> list[Candidate]:
    """Without those that another beats in everything at once, whatever the link and the speed of either side become.

    ``costs``: of `OTHER_COSTS` those that count, beside the times of both sides and the bytes of both ways.
    """

    def of(one: Candidate) -> tuple[float, ...]:
        own = sum(one.stages_ns.get(stage, 0.0) for stage in ("prepare", "edge", "encode"))
        found = {
            "memory": one.edge_memory.value or 0.0,
            "energy": one.edge_energy.value or 0.0,
            "accuracy": -(one.accuracy or 0.0),
        }
        return own, one.bytes_up, one.bytes_down, one.server_ns, *(found[name] for name in OTHER_COSTS if name in costs)

    kept: list[tuple[tuple[float, ...], Candidate]] = []
    for mine, one in sorted(((of(one), one) for one in candidates), key=lambda pair: pair[0]):
        if not any(all(a <= b for a, b in zip(other, mine, strict=True)) for other, _ in kept):
            kept.append((mine, one))
    return [one for _, one in kept]
