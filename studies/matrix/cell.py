"""One cell of the matrix: one edge, one model, every cut through the link."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from studies.matrix.edges import Edge

SPECS = {"digits": "digits", **{name: f"studies/matrix/{name}.toml" for name in ("resnet", "vit", "bert")}}
"""Models by name, as both sides are given them; paths from the project's root."""
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Cell:
    """``answered`` of ``cuts`` cuts, ``exact`` of them bit for bit as one side's whole model; ``apart``: the answer
    furthest from the whole model on the edge, in units of the output's scale; ``sides``: the two whole models from each
    other; ``notes``: differences that change no result; ``error``: why there are no answers, by name.
    """

    edge: str
    model: str
    ok: bool
    cuts: int = 0
    answered: int = 0
    exact: int = 0
    refused: int = 0
    apart: float = 0.0
    sides: float = 0.0
    top1: float | None = None
    notes: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def cell(edge: Edge, model: str, address: str) -> Cell:
    """Ask for every cut of ``model`` at the server there."""
    words = ["-m", "edge_client", "verify", "--server", address, "--model", SPECS[model], "--threads", "1"]
    try:
        done = edge.run(*words, "--json", "-", "--no-progress")
    except (subprocess.TimeoutExpired, OSError) as error:
        return Cell(edge.name, model, False, error=f"{type(error).__name__}: {error!s:.300}")
    try:
        found = json.loads(done.stdout)
    except json.JSONDecodeError:
        last = done.stderr.strip().splitlines()[-1:] or ["said nothing"]
        return Cell(edge.name, model, False, error=last[0][:600])
    cuts = found["cuts"]
    answered = [one for one in cuts if one["here"] is not None]
    return Cell(
        edge.name,
        model,
        found["ok"],
        len(cuts),
        len(answered),
        sum(one["exact"] for one in answered),
        sum(one["refused"] for one in cuts),
        found["largest"],
        found["sides"]["largest"] if found["sides"] else 0.0,
        found["top1"],
        tuple(found["notes"]),
        tuple(one["name"] for one in cuts if not one["refused"] and one["here"] is None),
    )
