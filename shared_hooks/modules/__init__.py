"""The modules of a model, and how Isthmus attaches to them.

attach     the shim before a module's forward
constants  numbers, and what else never changes, in modules and code; digests
tables     which modules are walked, and tensors that no state dictionary names; groups
manifest   the facts behind all digests

May import tensors, errors.
"""

from shared_hooks.modules.attach import (
    COMPILED,
    Replacement,
    Runner,
    Shim,
    Shown,
    fast_path_off,
    put_replacement,
    running,
)
from shared_hooks.modules.constants import FUNCTIONS, structure_digest, weights_hash
from shared_hooks.modules.tables import (
    GROUP,
    INPUT,
    ROOT,
    ModuleInfo,
    call_name,
    call_parts,
    groups_of,
    holder_modules,
    walk,
)

__all__ = [
    "COMPILED",
    "FUNCTIONS",
    "GROUP",
    "INPUT",
    "ROOT",
    "ModuleInfo",
    "Replacement",
    "Runner",
    "Shim",
    "Shown",
    "call_name",
    "call_parts",
    "fast_path_off",
    "groups_of",
    "holder_modules",
    "put_replacement",
    "running",
    "structure_digest",
    "walk",
    "weights_hash",
]
