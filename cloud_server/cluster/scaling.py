"""How many replicas the work there is wants: Ray Serve's controller asks. Loads nothing: it runs in that process."""

from __future__ import annotations

import math
from typing import Any

PENDING = "pending"
"""The figure that replicas report: requests received, waiting or running."""


def by_pending(context: Any) -> tuple[int, dict[str, Any]]:
    """A policy of Ray Serve's (``ray.serve.config.AutoscalingContext``), which applies its own delays and bounds to it.

    Its ``target_ongoing_requests`` is `Scale.target_pending`. Until a replica has reported, nothing changes.
    """
    figures = (context.aggregated_metrics or {}).get(PENDING) or {}
    if not figures:
        return context.target_num_replicas, {}
    return max(1, math.ceil(sum(figures.values()) / context.config.target_ongoing_requests)), {}
