"""What ``plan`` and ``run --split auto`` may not exceed, from the words of the command line."""

from __future__ import annotations

import argparse

from edge_client import units
from edge_client.planning.objective import Constraints


def constraints_of(options: argparse.Namespace) -> Constraints:
    """Raises SpecError for a size that is none."""
    memory, traffic = options.max_edge_memory, options.max_bytes_per_second
    return Constraints(
        units.size("--max-edge-memory", memory) if memory else None,
        units.size("--max-bytes-per-second", traffic) if traffic else None,
        options.rate,
        options.min_accuracy,
    )
