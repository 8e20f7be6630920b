"""Where a model is cut for generation, at the same module call in every step; and the settings around a step."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shared_hooks.devices import CPU, is_host
from shared_hooks.errors import MALFORMED, BadFrame, CutRefused, UnknownLayer
from shared_hooks.forward.context import ambient
from shared_hooks.modules import tables
from shared_hooks.modules.attach import hooks_of
from shared_hooks.state.reach import ForwardCode
from shared_hooks.tensors import ClassFinder, classes_of


@dataclass(frozen=True)
class GenerationCut:
    """A cut. ``name``: a module's path, with ``#n`` for its n-th call. ``above``: the modules around it, whose own code
    runs on both sides.
    """

    name: str
    path: str
    number: int
    above: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module, name: str) -> GenerationCut:
        """Return the cut of this name. Raises UnknownLayer and CutRefused."""
        path, number = tables.call_parts(name)
        if path == "":
            raise UnknownLayer(f'no layer "{name}": name the module after which the model is cut')
        known = dict(model.named_modules())
        if path not in known:
            near = [one for one in known if one.endswith(path.rsplit(".", 1)[-1])][:3]
            raise UnknownLayer(f'the model has no module "{path}"' + (f"; it has {', '.join(near)}" if near else ""))
        if isinstance(known[path], (nn.ModuleList, nn.ModuleDict)):
            raise CutRefused(f"{path} is a list of modules and is never called: name one of them, such as {path}.0")
        # torch has compiled nothing without its compiler
        if "torch._dynamo" in sys.modules and (compiled := ForwardCode(model).compiled()):
            raise CutRefused(
                f"{compiled[0]} was made by torch.compile, which reads what a split step runs around it, too: set "
                "TORCH_COMPILE_DISABLE=1 on both sides (a module that is compiled as a whole may stay)"
            )
        parts = path.split(".")
        above = {".".join(parts[:count]) for count in range(1, len(parts))} | {""}
        return cls(name, path, number, frozenset(above))


def check_order(first: GenerationCut, second: GenerationCut) -> None:
    """Check that a part may run from one cut to the other. Raises CutRefused."""
    if not first.above <= second.above or second.path in first.above:
        raise CutRefused(
            f"a part from {first.name} to {second.name}: the second cut must be after a module in the same list of "
            "blocks as the first, or within one of them"
        )
    if (first.path, first.number) == (second.path, second.number):
        raise CutRefused(f"two parts of a chain begin after {first.name}")


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model: the first accelerator with any of its weights, else the CPU. Weights that one side
    lacks are on meta, or in files, which count as the CPU's.
    """
    there = (tensor.device for tensor in (*model.parameters(), *model.buffers()))
    return next((device for device in there if not is_host(device)), CPU)


def finder_of(model: nn.Module) -> ClassFinder:
    """Finds the classes of results that the model's modules may return."""
    return classes_of(tables.holder_modules(model))


# What decides a forward beside the model and what it is given: autocast, training, users' hooks on modules.
#
#     {"autocast": [[device type, dtype], ...], "training": [path, ...], "hooks": [[path, name], ...]}
#
# The edge says it where it differs from what is usual (none of these). Of hooks it says those that the other side has
# to
# run. The tail restores autocast, and refuses what it has not.

USUAL: dict[str, Any] = {"autocast": [], "training": [], "hooks": []}
SHOWN = 4


def around(paths: Mapping[nn.Module, str], model: nn.Module, run: Collection[str]) -> dict[str, Any]:
    """Return the settings around a step on the edge. ``run``: the calls that were made here, with their hooks."""
    hooks = [
        [path, name]
        for module, path in paths.items()
        if (module._forward_hooks or module._forward_pre_hooks) and not _is_within(path, run)
        for name in hooks_of(module)
    ]
    return {**ambient(), "training": training(paths, model), "hooks": hooks}


def _is_within(path: str, run: Collection[str]) -> bool:
    parts = path.split(".")
    return any(".".join(parts[:count]) in run for count in range(1, len(parts) + 1))


def training(paths: Mapping[nn.Module, str], model: nn.Module) -> list[str]:
    """Return the paths of the modules in training mode; ["*"] if all are."""
    modules = {model: "", **paths}
    found = [path for module, path in modules.items() if module.training]
    return ["*"] if found and len(found) == len(modules) else found


def check_around(reported: Any, paths: Mapping[nn.Module, str], model: nn.Module) -> None:
    """Check the edge's settings on the tail's side. Raises CutRefused for a difference, and BadFrame."""
    try:
        requested, hooks = list(reported["training"]), [(str(path), str(name)) for path, name in reported["hooks"]]
    except MALFORMED as error:
        raise BadFrame(f"malformed surroundings of a step: {error!s:.80}") from error
    here = training(paths, model)
    if here != requested:
        raise CutRefused(
            f"the edge's model is in training at {_few(requested)}, and this side's at {_few(here)}: dropout and the "
            "like are not the same (model.eval() on both sides)"
        )
    modules = {path: module for module, path in paths.items()} if hooks else {}
    for path, name in hooks:
        if path not in modules or name not in hooks_of(modules[path]):
            raise CutRefused(
                f"the hook {name:.80} on {path:.80} would have to run on this side of the cut, and is not here: "
                "put it on a module before the cut, or use observers"
            )


def _few(paths: list[Any]) -> str:
    if not paths:
        return "no module"
    named = ["all modules" if path == "*" else str(path)[:80] or "the model" for path in paths[:SHOWN]]
    return ", ".join(named) + (f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else "")
