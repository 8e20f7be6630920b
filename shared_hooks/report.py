"""What ``verify`` found: every cut of a model against the whole model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shared_hooks.planning import LayerInfo


@dataclass(frozen=True)
class Report:
    """Cuts that are exact bit for bit, that the plan refuses (with the reason), and that differ (a defect)."""

    exact: tuple[LayerInfo, ...]
    refused: tuple[LayerInfo, ...]
    differing: tuple[LayerInfo, ...]
    input_exact: bool

    @property
    def ok(self) -> bool:
        """Whether no cut gives another answer than the whole model."""
        return not self.differing and self.input_exact

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "ok": self.ok,
            "input_exact": self.input_exact,
            "cuts": len(self.exact) + len(self.refused) + len(self.differing),
            "exact": [info.layer_id for info in self.exact],
            "refused": [asdict(info) for info in self.refused],
            "differing": [asdict(info) for info in self.differing],
        }
