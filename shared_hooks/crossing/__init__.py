"""What crosses a cut, as both sides see it: a description, and bytes.

description   what describes a cut: inputs, slots, marks
format        ... read from untrusted bytes
early         the values that cross, with their description
books         what a calibration learns of the values that cross
parcel        tensors <-> header and payload
packing       ... made section by section
generators    states of random generators that cross
path_digest   a digest of the path to a cut

May import tensors, errors.
"""

from shared_hooks.crossing.books import books_of
from shared_hooks.crossing.description import (
    INPUTS,
    Crossing,
    Fill,
    Given,
    Layout,
    Mark,
    Place,
    Read,
    Slot,
    TensorForm,
    digest_of,
    mixes_truth,
)
from shared_hooks.crossing.early import EarlyOutput, parts
from shared_hooks.crossing.format import decode, decoded_bytes
from shared_hooks.crossing.generators import torch_generator
from shared_hooks.crossing.packing import ALIGN, Packing
from shared_hooks.crossing.parcel import MAX_RANK, Parcel, Section, read_header
from shared_hooks.crossing.path_digest import CALL, PathDigest

__all__ = [
    "ALIGN",
    "CALL",
    "INPUTS",
    "MAX_RANK",
    "Crossing",
    "EarlyOutput",
    "Fill",
    "Given",
    "Layout",
    "Mark",
    "Packing",
    "Parcel",
    "PathDigest",
    "Place",
    "Read",
    "Section",
    "Slot",
    "TensorForm",
    "books_of",
    "decode",
    "decoded_bytes",
    "digest_of",
    "mixes_truth",
    "parts",
    "read_header",
    "torch_generator",
]
