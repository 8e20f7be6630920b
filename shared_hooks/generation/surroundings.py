"""What decides a forward beside the model and what it is given: autocast, training, hooks that somebody put on modules.

    {"autocast": [[device type, dtype], ...], "training": [path, ...], "hooks": [[path, name], ...]}

The edge says it where it differs from what is usual (none of these). Of hooks it says those that the other side has to
run. The tail restores autocast, and refuses what it has not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from shared_hooks.errors import MALFORMED, BadFrame, CutRefused
from shared_hooks.forward.context import ambient

USUAL: dict[str, Any] = {"autocast": [], "training": [], "hooks": []}
_OUR_OWN = ("shared_hooks.", "transformers.utils.output_capturing")
"""Hooks that look, and that each side puts on for itself."""
SHOWN = 4


def around(paths: Mapping[nn.Module, str], model: nn.Module, run: Collection[str]) -> dict[str, Any]:
    """On the edge. ``run``: the calls that were made here, hooks and all."""
    hooks = [
        [path, name]
        for module, path in paths.items()
        if (module._forward_hooks or module._forward_pre_hooks) and not _is_within(path, run)
        for name in _hooks(module)
    ]
    return {**ambient(), "training": training(paths, model), "hooks": hooks}


def _is_within(path: str, run: Collection[str]) -> bool:
    parts = path.split(".")
    return any(".".join(parts[:count]) in run for count in range(1, len(parts) + 1))


def _hooks(module: nn.Module) -> list[str]:
    found = []
    for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        kind = hook if hasattr(hook, "__qualname__") else type(hook)
        name = f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', '')}"
        if not name.startswith(_OUR_OWN):
            found.append(name)
    return found


def training(paths: Mapping[nn.Module, str], model: nn.Module) -> list[str]:
    """Paths of the modules that are in training; ["*"] where all are."""
    modules = {model: "", **paths}
    found = [path for module, path in modules.items() if module.training]
    return ["*"] if found and len(found) == len(modules) else found


def check(said: Any, paths: Mapping[nn.Module, str], model: nn.Module) -> None:
    """On the tail's side. Raises CutRefused for what is otherwise on the edge, and BadFrame."""
    try:
        asked, hooks = list(said["training"]), [(str(path), str(name)) for path, name in said["hooks"]]
    except MALFORMED as error:
        raise BadFrame(f"malformed surroundings of a step: {error!s:.80}") from error
    here = training(paths, model)
    if here != asked:
        raise CutRefused(
            f"the edge's model is in training at {_few(asked)}, and this side's at {_few(here)}: dropout and the like "
            "are not the same (model.eval() on both sides)"
        )
    modules = {path: module for module, path in paths.items()} if hooks else {}
    for path, name in hooks:
        if path not in modules or name not in _hooks(modules[path]):
            raise CutRefused(
                f"the hook {name:.80} on {path:.80} would have to run on this side of the cut, and is not here: "
                "put it on a module before the cut, or use observers"
            )


def _few(paths: list[Any]) -> str:
    if not paths:
        return "no module"
    named = ["all modules" if path == "*" else str(path)[:80] or "the model" for path in paths[:SHOWN]]
    return ", ".join(named) + (f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else "")
