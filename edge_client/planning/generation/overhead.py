"""What a split step takes beside the model's own work, measured on a few real ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from shared_hooks.profiling.decoding.line import Line
from shared_hooks.showing import short

HEADER_BYTES: Final = 200
"""Bytes of a step's header each way, where none was measured."""


@short
@dataclass(frozen=True)
class Overhead:
    """``network_ns``: of a step, beyond the link; negative where steps were faster than its probe. Bytes beside the
    hidden states (``up``) and the logits (``down``): of a step by the tokens before it, of a prompt by its tokens.
    """

    network_ns: float = 0.0
    step_up: Line = field(default_factory=lambda: Line(HEADER_BYTES))
    prefill_up: Line = field(default_factory=lambda: Line(HEADER_BYTES))
    step_down: Line = field(default_factory=lambda: Line(HEADER_BYTES))
    prefill_down: Line = field(default_factory=lambda: Line(HEADER_BYTES))

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        lines = ("step_up", "prefill_up", "step_down", "prefill_down")
        return {
            "network_ns": self.network_ns,
            **{
                f"{name}_bytes": {"fixed": getattr(self, name).fixed, "per_token": getattr(self, name).slope}
                for name in lines
            },
        }
