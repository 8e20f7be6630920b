"""The ways to run a request without a cut, by the names that ``--split`` takes."""

from __future__ import annotations

from typing import Final

EDGE_ONLY: Final = "edge-only"
CLOUD_ONLY: Final = "cloud-only"
CLOUD_FILE: Final = "cloud-only-file"
"""Everything on the cloud: the raw input crosses (the cut "input"), or the file it came as."""

AUTO: Final = "auto"
"""One of these or a cut, chosen for every request (`edge_client.adaptive`)."""

WORDS: Final = (EDGE_ONLY, CLOUD_ONLY, CLOUD_FILE, AUTO)
"""All that a split may be and that is no cut of the model."""
