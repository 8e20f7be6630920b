"""Which modules are the decoder's blocks: the children of a list, each called once in every step, in order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import nn

from shared_hooks.errors import CutRefused
from shared_hooks.profiling.decoding.prompts import Prompt, generated

Named = tuple[str, nn.Module]


def blocks_of(model: nn.Module, prompt: Prompt) -> list[Named]:
    """Their paths, in order, seen in a second step of generate(). Of several lists the one with the most weights.

    Raises CutRefused where there is none.
    """
    called: list[nn.Module] = []
    inside = [child for one in model.modules() if isinstance(one, (nn.ModuleList, nn.Sequential)) for child in one]
    with ExitStack() as hooks:
        hooks.callback(model.register_forward_pre_hook(lambda module, args: called.clear()).remove)
        for child in {id(one): one for one in inside}.values():
            hooks.callback(child.register_forward_pre_hook(lambda module, args: called.append(module)).remove)
        generated(model, prompt(4), 2)
    counts: dict[nn.Module, int] = {}
    for module in called:
        counts[module] = counts.get(module, 0) + 1
    found: list[list[Named]] = []
    for path, one in model.named_modules():
        if isinstance(one, (nn.ModuleList, nn.Sequential)) and len(one) > 1:
            children = [(f"{path}.{name}", child) for name, child in one.named_children()]
            if all(counts.get(child) == 1 for _, child in children) and _in_order(children, called):
                found.append(children)
    if not found:
        raise CutRefused(f"{type(model).__name__} has no list of blocks that are called once each in a step")
    return max(found, key=lambda children: sum(weights_bytes(child) for _, child in children))


def weights_bytes(module: nn.Module) -> int:
    """Bytes of its parameters and buffers, shared ones once."""
    tensors = {id(one): one for one in (*module.parameters(), *module.buffers())}
    return sum(nbytes_of(one) for one in tensors.values())


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes of its elements."""
    return tensor.numel() * tensor.element_size()


def _in_order(children: Sequence[Named], called: list[nn.Module]) -> bool:
    own = {child for _, child in children}
    return [one for one in called if one in own] == [child for _, child in children]
