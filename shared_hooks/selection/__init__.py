"""Select channels by their activations: which channels of a layer matter, and how to send or keep only those.

capture   statistics of a layer's channels over a data set
channels  which modules make, carry and read the same channels, and how channels are scored
prune     removes channels: a smaller model; and its file
"""

from shared_hooks.selection.capture import Captured, Sample, capture
from shared_hooks.selection.channels import SCORINGS, best, score
from shared_hooks.selection.prune import Mask, Selection, masked, pruned, read_selection, write_mask, write_pruned

__all__ = [
    "SCORINGS",
    "Captured",
    "Mask",
    "Sample",
    "Selection",
    "best",
    "capture",
    "masked",
    "pruned",
    "read_selection",
    "score",
    "write_mask",
    "write_pruned",
]
