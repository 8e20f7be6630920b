"""The static module tree: which modules are walked, and by which names."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import nn

from shared_hooks.modules.attach import COMPILED

ROOT = "(model)"


@dataclass(frozen=True)
class ModuleInfo:
    """One module of the tree. ``path`` is its first name; ``(model)`` for the model itself."""

    path: str
    module_type: str
    opaque: bool


def is_opaque(module: nn.Module) -> bool:
    """Scripted and compiled modules run outside Python's sight: one layer, nothing inside."""
    return (
        isinstance(module, torch.jit.ScriptModule)
        or type(module).__name__ == "OptimizedModule"
        or module.__dict__.get(COMPILED) is not None  # compiled in place
    )


def walk(model: nn.Module, depth: int | None) -> dict[nn.Module, ModuleInfo]:
    """Every module down to ``depth`` (0 = the model alone, None = all), under its first name, in definition order."""
    found: dict[nn.Module, ModuleInfo] = {}
    deepest = 0
    waiting = [(model, "", 0)]
    while waiting:
        module, path, level = waiting.pop()
        if module in found:
            continue
        deepest = max(deepest, level)
        opaque = is_opaque(module)
        found[module] = ModuleInfo(path or ROOT, type(module).__name__, opaque)
        if not opaque and (depth is None or level < depth):
            children = [
                (child, f"{path}.{name}" if path else name, level + 1) for name, child in module.named_children()
            ]
            waiting += reversed(children)
    # a module's call takes three frames of its own, and ours as many again
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000 + 16 * deepest if deepest > 50 else 0))
    return found


def aliases(model: nn.Module) -> dict[str, str]:
    """Second and further names of a module -> its first name."""
    first: dict[nn.Module, str] = {}
    found: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        kept = first.setdefault(module, name or ROOT)
        if kept != (name or ROOT):
            found[name] = kept
    return found


def holder_modules(model: nn.Module) -> set[str]:
    """Python modules whose dataclasses and named tuples this model may take or return: those its own classes live
    in.
    """
    found = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    if any(name.startswith("transformers.") for name in found):
        found.add("transformers.modeling_outputs")
    return found | {"torch.nn.utils.rnn"}


def call_name(path: str, number: int) -> str:
    """What a module's call is called: the module's path, with ``#n`` from the second call on."""
    return path if number == 1 else f"{path}#{number}"
