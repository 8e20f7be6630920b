"""How a tensor travels as bytes: one small interface (`Codec`), one file a codec, and this list.

grain       which elements are a channel's, which a token's
codec       the interface
byte_codec  ... for codecs that see bytes only
raw, lz4, zstd      without loss, of bytes as they are
shuffled, sparse    ... byte by byte of the elements, and beside a mask of zeros
half, quantised     with a loss: 16 bits, and 8 to 1
basis               ... by what a calibration learnt of one tensor
steps, clipping     how wide a quantiser's steps are
sections            several runs of bytes as one, compressed

To add a codec, write a file with a `Codec` and name it in `CODECS`. Command lines, profiles, parcels and the tests
that send hostile bytes take codecs from here. Both sides must have it: a side without it refuses it by name.
"""

import torch

from shared_hooks.codecs.basis import Basis, Frames
from shared_hooks.codecs.codec import Bound, Codec, Coded, Param
from shared_hooks.codecs.grain import Grain
from shared_hooks.codecs.half import Half
from shared_hooks.codecs.lz4 import Lz4
from shared_hooks.codecs.quantised import Quantised
from shared_hooks.codecs.raw import Raw
from shared_hooks.codecs.sections import Zstd
from shared_hooks.codecs.shuffled import Shuffled
from shared_hooks.codecs.sparse import Sparse
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
