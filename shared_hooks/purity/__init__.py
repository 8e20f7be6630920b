"""Which modules provably write no state, so that a tail need not run them.

modules  whether a module is pure
code     the source of its forward, read as an abstract program
turns    threads take turns to run a model that is not pure

May import forward, modules, errors.
"""

from shared_hooks.purity.code import Impure, source_of
from shared_hooks.purity.modules import is_pure, is_safe, pure_modules
from shared_hooks.purity.turns import Turns

__all__ = [
    "Impure",
    "Turns",
    "is_pure",
    "is_safe",
    "pure_modules",
    "source_of",
]
