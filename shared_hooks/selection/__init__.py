"""Activation-based channel selection: which channels of a layer matter, and how to send or keep only those.

places     where to look: object boxes as feature cells, predictions matched to true boxes
capture    a layer's channels over a data set, by a forward hook
scores     a score for every channel
clusters   k-medoids
mask       at the cut: the chosen channels cross, the others are their calibration mean
channels   which modules make, carry and read the same channels
prune      the chosen channels cut out: a smaller model
file       mask or smaller model as a file that both sides of a cut read
"""

from shared_hooks.selection.capture import Captured, Sample, capture
from shared_hooks.selection.file import Selection, read_selection, write_mask, write_pruned
from shared_hooks.selection.mask import Mask, masked
from shared_hooks.selection.prune import pruned
from shared_hooks.selection.scores import SCORINGS, best, score

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
