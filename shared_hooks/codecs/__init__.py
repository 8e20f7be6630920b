"""Encode tensors for the wire: a small interface (`Codec`) and the built-in codecs (`CODECS`).

codec      the interface, and lossless codecs: raw, lz4, shuffled, sparse; half: 16 bits
quantised  8 to 1 bits per element
basis      a basis calibrated for one tensor
learned    an encoder and decoder trained for one cut
noise      noise on the values that cross
registry   codecs by name

A built-in codec is a file here and a name in `registry.CODECS`; a codec of another package needs no change here
(docs/codec-plugins.md). Command lines, profiles, parcels and the tests with hostile bytes take codecs from the
registry. Both sides must have a codec: a side without it refuses it by name.
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
