"""Represent what crosses a cut: a description, and bytes.

description  what describes a cut: inputs, slots, marks, a digest of the path
format       reads a description from untrusted bytes
early        the values that cross, with their description
parcel       tensors <-> header and payload
named        what crosses as tensors with names, for heads that are not torch's
generators   states of random generators that cross

May import tensors, errors.
"""

from shared_hooks.crossing.description import (
    CALL,
    INPUTS,
    Crossing,
    Fill,
    Given,
    Layout,
    Mark,
    PathDigest,
    Place,
    ReadForm,
    Slot,
    TensorForm,
    digest_of,
    mixes_truth,
)
from shared_hooks.crossing.early import EarlyOutput, books_of, parts
from shared_hooks.crossing.format import decode, decoded_bytes
from shared_hooks.crossing.generators import torch_generator
from shared_hooks.crossing.named import (
    NamedCrossing,
    NamedNumbers,
    NamedTensor,
    as_held,
    as_sent,
    by_parameter,
    leaves,
    named_crossing,
)
from shared_hooks.crossing.parcel import ALIGN, MAX_RANK, Packing, Parcel, Section, read_header

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
    "NamedCrossing",
    "NamedNumbers",
    "NamedTensor",
    "Packing",
    "Parcel",
    "PathDigest",
    "Place",
    "ReadForm",
    "Section",
    "Slot",
    "TensorForm",
    "as_held",
    "as_sent",
    "books_of",
    "by_parameter",
    "decode",
    "decoded_bytes",
    "digest_of",
    "leaves",
    "mixes_truth",
    "named_crossing",
    "parts",
    "read_header",
    "torch_generator",
]
