"""Tails whose modules torch.compile has made faster, checked against the model's own before they are used.

tails    the compiled tails of one model: made in the background, compared, used, given up
modules  one module, compiled apart from the model

May import wrapped, and all below it.
"""

from shared_hooks.compiling.tails import TOLERANCE, CompiledTails, Standing, difference

__all__ = [
    "TOLERANCE",
    "CompiledTails",
    "Standing",
    "difference",
]
