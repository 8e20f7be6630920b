"""Tails whose modules torch.compile has made faster, checked against the model's own before they are used.

tails    the compiled tails of one model: made in the background, compared, used, given up
finding  which modules of a tail can be compiled: the outermost that are called behind the cut
modules  one module, compiled apart from the model
graphs   ... and replayed as a CUDA graph
compare  two outputs: the same bits, or within rounding

May import wrapped, and all below it.
"""

from shared_hooks.compiling.compare import TOLERANCE, difference
from shared_hooks.compiling.tails import CompiledTails, Standing

__all__ = [
    "TOLERANCE",
    "CompiledTails",
    "Standing",
    "difference",
]
