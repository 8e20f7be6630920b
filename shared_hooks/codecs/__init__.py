"""How a tensor travels as bytes: one small interface (`Codec`), and the codecs that there are (`CODECS`).

codec      the interface; raw, lz4, shuffled, sparse: bytes as they are; half: 16 bits
quantised  8 to 1 bits an element
basis      by what a calibration learnt of one tensor
learned    by an encoder and a decoder that were trained for one cut
noise      noise on what crosses
registry   codecs by name

A codec of Isthmus's own is a file here and a name in `registry.CODECS`; one of yours needs no change here
(docs/codec-plugins.md). Command lines, profiles, parcels and the tests that send hostile bytes take codecs from there.
Both sides must have it: a side without it refuses it by name.
"""

from shared_hooks.codecs.codec import RAW, Bound, Codec, Coded, Grain, Param
from shared_hooks.codecs.registry import CODECS, added, by_wire, check, is_offered, offered, register, temporary

__all__ = [
    "CODECS",
    "RAW",
    "Bound",
    "Codec",
    "Coded",
    "Grain",
    "Param",
    "added",
    "by_wire",
    "check",
    "is_offered",
    "offered",
    "register",
    "temporary",
]
