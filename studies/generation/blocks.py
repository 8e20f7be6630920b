"""Where a decoder's blocks are, found by what is called in a step of it, whatever the module tree is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from studies.library.subject import NotUsable

OTHERS = ("encoder.", "vision", "visual", "audio", "expert")
"""Parts of a path that tell what is not the decoder, where a model without a cache calls everything in every step."""


def generating_part(model: nn.Module, generate: Callable[[], Any]) -> str:
    """The path of the module whose forward is a step: "" for the model itself, unless its ``generate`` leaves the steps
    to a part that generates by itself. Raises NotUsable where a step is not called as a module.
    """
    counts = {
        path: 0
        for path, module in model.named_modules()
        if hasattr(module, "prepare_inputs_for_generation") and hasattr(module, "generation_config")
    }

    def count(path: str) -> None:
        counts[path] += 1

    hooks = [model.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: count(path)) for path in counts]
    _run(generate, hooks)
    stepped = [path for path, times in counts.items() if times > 1]
    if not stepped:
        raise NotUsable("generate calls no module more than once")
    return min(stepped, key=lambda path: path.count(".") + bool(path))


def decoder_blocks(model: nn.Module, generate: Callable[[], Any]) -> list[str]:
    """The paths of those entries of the largest list of modules near the root that the last step calls.

    ``model``: what is called for a step. ``generate`` makes some tokens, in more than one step. A list counts if a step
    calls most of it: some blocks are for pictures only. Raises NotUsable where there is none.
    """
    lists = {
        path: [f"{path}.{name}" for name, _ in module.named_children()]
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1
    }
    entries = {entry for found in lists.values() for entry in found}
    called: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda *_, path=path: called.add(path))
        for path, module in model.named_modules()
        if path in entries
    ]
    hooks.append(model.register_forward_pre_hook(lambda *_: called.clear()))
    _run(generate, hooks)
    found = {path: [one for one in own if one in called] for path, own in lists.items()}
    found = {path: own for path, own in found.items() if len(own) > len(lists[path]) / 2}
    if not found:
        raise NotUsable("generate calls no list of blocks in every step")
    best = min(found, key=lambda path: (any(word in f"{path}." for word in OTHERS), path.count("."), -len(found[path])))
    return found[best]


def _run(generate: Callable[[], Any], hooks: list[Any]) -> None:
    try:
        with torch.no_grad():
            generate()
    finally:
        for hook in hooks:
            hook.remove()
