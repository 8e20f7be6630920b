"""What observers leave behind: nothing."""

from __future__ import annotations

from torch import nn

from shared_hooks.modules.attach import COMPILED, Shim


def hooks_left(model: nn.Module) -> list[str]:
    """Names of modules with a hook of PyTorch's or a forward of their own."""
    return [
        name
        for name, module in model.named_modules()
        if "forward" in vars(module)
        or isinstance(vars(module).get(COMPILED), Shim)
        or any(
            vars(module).get(kind)
            for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        )
    ]
