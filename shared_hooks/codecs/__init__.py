"""How a tensor travels as bytes: one small interface (`Codec`), one file a codec, and this list.

codec      the interface; which elements are a channel's; how wide a quantiser's steps are
lossless   raw, lz4, shuffled, sparse: bytes as they are; half: 16 bits
quantised  8 to 1 bits an element
basis      by what a calibration learnt of one tensor

To add a codec, write a file with a `Codec` and name it in `CODECS`. Command lines, profiles, parcels and the tests
that send hostile bytes take codecs from here. Both sides must have it: a side without it refuses it by name.
"""

import torch

from shared_hooks.codecs.basis import Basis, Frames
from shared_hooks.codecs.codec import Bound, Codec, Coded, Grain, Param
from shared_hooks.codecs.lossless import Half, Lz4, Raw, Shuffled, Sparse, Zstd
from shared_hooks.codecs.quantised import Quantised
from shared_hooks.errors import SpecError, near

__all__ = ["CODECS", "RAW", "Bound", "Codec", "Coded", "Grain", "Param", "check"]

RAW = Raw()
CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        RAW,
        Lz4(),
        Zstd(),
        Shuffled(Lz4()),
        Shuffled(Zstd()),
        Sparse(),
        Half("bf16", torch.bfloat16),
        Half("fp16", torch.float16),
        *(Quantised(bits) for bits in (8, 6, 5, 4, 3, 2, 1)),
        Basis(),
        Frames(),
    )
}


def check(name: str) -> str:
    """``name``, if there is such a codec. Raises SpecError with those that there are."""
    if name not in CODECS:
        raise SpecError(f'codec="{name}": must be one of {", ".join(CODECS)}.{near(name, CODECS)}')
    return name
