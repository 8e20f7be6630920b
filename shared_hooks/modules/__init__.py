"""The model as it stands: its modules, and how Isthmus attaches to them.

tables    which modules are walked, and what they compute with that no state dictionary names; groups
attach    the shim before a module's forward
manifest  what all digests are made of, fact by fact

May import tensors, errors.
"""

from shared_hooks.modules.attach import COMPILED, Instead, Runner, Shim, Shown, fast_path_off, put_instead, running
from shared_hooks.modules.tables import (
    GROUP,
    ROOT,
    ModuleInfo,
    call_name,
    groups_of,
    holder_modules,
    structure_digest,
    walk,
    weights_hash,
)

__all__ = [
    "COMPILED",
    "GROUP",
    "ROOT",
    "Instead",
    "ModuleInfo",
    "Runner",
    "Shim",
    "Shown",
    "call_name",
    "fast_path_off",
    "groups_of",
    "holder_modules",
    "put_instead",
    "running",
    "structure_digest",
    "walk",
    "weights_hash",
]
