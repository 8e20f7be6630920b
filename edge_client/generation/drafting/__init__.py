"""Several tokens a round trip: this side drafts some, and the server verifies them in one step.

drafting    ``generate()`` of a model with drafts
"""

from edge_client.generation.drafting.drafting import (
    Assistant,
    Constant,
    Drafting,
    EarlyExit,
    FirstLayers,
    Lookup,
    Measured,
    Pace,
    Source,
)

__all__ = [
    "Assistant",
    "Constant",
    "Drafting",
    "EarlyExit",
    "FirstLayers",
    "Lookup",
    "Measured",
    "Pace",
    "Source",
]
