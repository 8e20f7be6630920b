"""The matrix as a table in Markdown, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from studies.matrix.cell import Cell


def as_text(edges: Mapping[str, Mapping[str, Any]], cells: Sequence[Cell]) -> str:
    """A row for each edge, a column for each model: ``47 of 47; 1.2e-06``, or why not."""
    models = list(dict.fromkeys(cell.model for cell in cells))
    by_place = {(cell.edge, cell.model): cell for cell in cells}
    rows = ["| edge | torch | Python | processor | " + " | ".join(models) + " |", "|---" * (4 + len(models)) + "|"]
    for name, about in edges.items():
        known = [name, about.get("torch", "?"), about.get("python", "?"), about.get("machine", "?")]
        rows.append("| " + " | ".join([*known, *(_cell(by_place.get((name, model))) for model in models)]) + " |")
    return "\n".join(rows)


def _cell(found: Cell | None) -> str:
    if found is None:
        return ""
    if found.error:
        return f"**no**: {found.error}".replace("|", "/")
    verdict = "" if found.ok else "**WRONG** "
    apart = "same bits" if found.apart == 0 else f"{found.apart:.1e}"
    refused = f", {found.refused} refused" if found.refused else ""
    notes = f", {len(found.notes)} notes" if found.notes else ""
    return f"{verdict}{found.answered} of {found.cuts - found.refused}{refused}; {apart}{notes}"
