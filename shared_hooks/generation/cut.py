"""Where a model is cut for generation: after a call of one module, the same one in every step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from shared_hooks.errors import CutRefused, UnknownLayer
from shared_hooks.modules import tables
from shared_hooks.tensors import ClassFinder, classes_of


@dataclass(frozen=True)
class Cut:
    """``name``: a module's path, with ``#n`` for its n-th call. ``above``: the modules around it, whose own code runs
    on both sides.
    """

    name: str
    path: str
    number: int
    above: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module, name: str) -> Cut:
        """Raises UnknownLayer and CutRefused."""
        path, _, number = name.partition("#")
        if path == "" or (number and not (number.isdigit() and int(number) > 0)):
            raise UnknownLayer(f'no layer "{name}": name the module after which the model is cut')
        known = dict(model.named_modules())
        if path not in known:
            near = [one for one in known if one.endswith(path.rsplit(".", 1)[-1])][:3]
            raise UnknownLayer(f'the model has no module "{path}"' + (f"; it has {', '.join(near)}" if near else ""))
        if isinstance(known[path], (nn.ModuleList, nn.ModuleDict)):
            raise CutRefused(f"{path} is a list of modules and is never called: name one of them, such as {path}.0")
        parts = path.split(".")
        above = {".".join(parts[:count]) for count in range(1, len(parts))} | {""}
        return cls(name, path, int(number or 1), frozenset(above))


def device_of(model: nn.Module) -> torch.device:
    """Where a model's weights are; those on meta (a side may lack the other's) do not count."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")


def finder_of(model: nn.Module) -> ClassFinder:
    """Finds the classes of results that the model's modules may give."""
    return classes_of(tables.holder_modules(model))
