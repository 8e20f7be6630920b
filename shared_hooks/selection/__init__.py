"""Activation-based channel selection: which channels of a layer matter, and how to send or keep only those.

capture   a layer's channels over a data set, by a forward hook
channels  which modules make, carry and read the same channels, and how they score
prune     the chosen channels cut out: a smaller model; kept in a file
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
