"""Several tokens a round trip: this side drafts some, and the server verifies them in one step.

sources     where drafts come from
drafting    ``generate()`` of a model with drafts
"""

from edge_client.generation.drafting.drafting import Constant, Drafting, Measured, Pace
from edge_client.generation.drafting.sources import Assistant, EarlyExit, FirstLayers, Lookup, Source

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
