"""Several tokens a round trip: this side drafts some, and the server verifies them in one step.

pace        how many tokens to draft, from what was measured
early_exit  the model's first layers with its own output head, as a model
sources     where drafts come from
drafting    ``generate()`` of a model with drafts
"""

from edge_client.generation.drafting.drafting import Drafting
from edge_client.generation.drafting.early_exit import EarlyExit
from edge_client.generation.drafting.pace import Constant, Measured, Pace
from edge_client.generation.drafting.sources import Assistant, FirstLayers, Lookup, Source

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
