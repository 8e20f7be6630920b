"""The model as it stands: its modules, and how Isthmus attaches to them.

hierarchy   which modules are walked, and their names
attach      the shim before a module's forward
instead     functions in place of a module's methods
fastpath    keeps PyTorch's attention fast path off
agreement   digests of structure, code and weights
tables      what it computes with that no state dictionary names
manifest    what all digests are made of, fact by fact

May import tensors, errors.
"""

from shared_hooks.modules.agreement import structure_digest, weights_hash
from shared_hooks.modules.attach import COMPILED, Runner, Shim, Shown, running
from shared_hooks.modules.fastpath import fast_path_off
from shared_hooks.modules.hierarchy import ROOT, ModuleInfo, call_name, holder_modules, walk
from shared_hooks.modules.instead import Instead, put_instead

__all__ = [
    "COMPILED",
    "ROOT",
    "Instead",
    "ModuleInfo",
    "Runner",
    "Shim",
    "Shown",
    "call_name",
    "fast_path_off",
    "holder_modules",
    "put_instead",
    "running",
    "structure_digest",
    "walk",
    "weights_hash",
]
