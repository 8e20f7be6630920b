"""What ``verify`` found: every cut of a model against the whole model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shared_hooks.planning import LayerInfo
from shared_hooks.showing import html_table, panel, size, strip, summary_of


@dataclass(frozen=True)
class Report:
    """Cuts that are exact bit for bit, that the plan refuses (with the reason), and that differ (a defect).

    ``unsendable``: why the model's output can be no answer to a request, whatever the cut; empty where it can.
    """

    exact: tuple[LayerInfo, ...]
    refused: tuple[LayerInfo, ...]
    differing: tuple[LayerInfo, ...]
    input_exact: bool
    unsendable: str = ""

    def __repr__(self) -> str:
        differing = f"{len(self.differing)} differ: " + " ".join(one.name for one in self.differing[:8])
        return summary_of(
            self,
            "ok" if self.ok else "NOT ok",
            f"{len(self.exact)} cuts exact",
            f"{len(self.refused)} refused",
            differing if self.differing else "",
            "" if self.input_exact else "the cut before the first layer differs",
            f"the output cannot be sent: {self.unsendable}" if self.unsendable else "",
        )

    def _repr_html_(self) -> str:
        said = {
            **{one.layer_id: (one, "exact") for one in self.exact},
            **{one.layer_id: (one, f"refused: {one.reason}") for one in self.refused},
            **{one.layer_id: (one, "DIFFERS from the whole model") for one in self.differing},
        }
        rows = [
            (str(number), one.name, one.layer_type, size(one.frontier_bytes), found)
            for number, (one, found) in sorted(said.items())
            if found != "exact"  # which the picture counts
        ]
        parts = (("exact", self.exact), ("refused", self.refused), ("DIFFERING", self.differing))
        counts = [(name, float(len(layers))) for name, layers in parts]
        title = f"{'ok' if self.ok else 'NOT ok'}: every cut against the whole model, bit for bit"
        if self.unsendable:
            title = f"{title}; the output cannot be sent: {self.unsendable}"
        return panel(
            title if self.input_exact else f"{title}; the cut before the first layer differs",
            strip(counts, f"{len(said)} cuts", [str(len(layers)) for _, layers in parts]),
            html_table(("id", "name", "type", "crosses", "found"), rows, (0, 3)) if rows else "",
        )

    @property
    def ok(self) -> bool:
        """Whether no cut gives another answer than the whole model, and the answer can be sent."""
        return not self.differing and self.input_exact and not self.unsendable

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "ok": self.ok,
            "input_exact": self.input_exact,
            "unsendable": self.unsendable,
            "cuts": len(self.exact) + len(self.refused) + len(self.differing),
            "exact": [info.layer_id for info in self.exact],
            "refused": [asdict(info) for info in self.refused],
            "differing": [asdict(info) for info in self.differing],
        }
