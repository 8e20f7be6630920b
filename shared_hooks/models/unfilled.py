"""A model built without memory for its parameters: their values come from files afterwards."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks.state.dice import Dice
from shared_hooks.tensors import tensors_in

log = logging.getLogger(__name__)


def unfilled(build: Callable[[], object]) -> object:
    """What ``build`` returns; if that is a module, its parameters have no memory (device "meta") wherever that is
    harmless, and all else is as it would be.

    Where ``build`` itself needs the values of parameters, or draws random numbers for anything that has memory (they
    would be others, as parameters draw none here), it is called once more, as it is: then all parameters have memory.
    What it drew may be anywhere by then, in an array, a number or a closure: nobody looks for it.
    """
    dice = Dice()
    try:
        with _Drawing() as drawing:
            made = _without_memory(build)
        if isinstance(made, nn.Module):
            if drawing.seen or dice.rolled:
                reason = "it draws random numbers"
            elif any(isinstance(module, torch.jit.ScriptModule) for module in made.modules()):
                reason = "it is scripted"
            elif any(tensor.is_meta for tensor in _outside_state(made)):
                reason = "it keeps tensors that no weights file holds, made of its parameters"
            else:
                return made
        else:
            reason = "it is no module"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    log.info("all parameters are in memory while the model is built: %s", reason)
    dice.restore()
    return build()


class _Drawing(TorchDispatchMode):
    """Sees whether torch draws for a tensor that has memory, also where the generator is put back afterwards."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.seen = self.seen or not all(tensor.is_meta for tensor in tensors_in(made))
        return made


def _without_memory(build: Callable[[], object]) -> object:
    thread = threading.get_ident()
    # by the address of a parameter that is registered in several places: it stays one
    known: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def replace(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if threading.get_ident() != thread or type(parameter) is not nn.Parameter or parameter.is_meta:
            return None
        if parameter.layout != torch.strided or not parameter.is_contiguous():
            return None
        kept = known.get(id(parameter))
        if kept is None or kept[0]() is not parameter:
            empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
            known[id(parameter)] = kept = weakref.ref(parameter), empty
        return kept[1]

    handle = register_module_parameter_registration_hook(replace)  # type: ignore[arg-type]  # it may return one
    try:
        return build()
    finally:
        handle.remove()


def _outside_state(model: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors of the model that are no parameters and that its state dictionary does not name."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name in module._non_persistent_buffers_set or buffer.is_meta:
                yield buffer
        parameters = {id(parameter) for parameter in module.parameters()}
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from (tensor for tensor in tensors_in(value) if id(tensor) not in parameters)
