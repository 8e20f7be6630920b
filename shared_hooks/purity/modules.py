"""Whether a module's Python provably writes no state outside of itself, so that a tail may skip its call.

Pure are modules of ``torch.nn`` whose own, unmodified code runs, and modules whose forward does only what `purity.code`
knows. What is not proven is not pure. Writes to tensors are not considered: the kernels of a recording show them. Nor
are the tensors of a call's arguments: a caller knows that they are plain tensors, numbers, text, None, or tuples of
those.
"""

from __future__ import annotations

import abc
import operator
import os
import sys
import types
import typing
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shared_hooks.forward import Placeholder
from shared_hooks.modules import COMPILED, Shim
from shared_hooks.modules.attach import _ABSENT, is_of_class
from shared_hooks.purity.code import Analysis, Impure, is_plain, torch_functions, torch_own

_TORCH_NN = os.path.join(torch.__path__[0], "nn") + os.sep
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
                 "_global_backward_pre_hooks")  # fmt: skip
_MODULE_OWN = frozenset(vars(nn.Module()))
# The steps of `Module.__call__` on its way to the forward.
_MACHINERY = frozenset(
    """
    _call_impl _wrapped_call_impl _slow_forward _get_backward_hooks _get_backward_pre_hooks _compiled_call_impl
    _maybe_warn_non_full_backward_hook
    """.split()
)
_CALLED = frozenset({"__call__", "__getattr__", "forward", "children", "named_children"})
# What a class may define without changing how its modules are called.
_HARMLESS = frozenset(
    """
    __init__ __module__ __doc__ __qualname__ __annotations__ __annotate__ __annotate_func__ __annotations_cache__
    __constants__ __repr__ __str__ __dict__ __weakref__ __parameters__ __orig_bases__ __abstractmethods__ __dir__
    __init_subclass__ __firstlineno__ __static_attributes__ __type_params__ __jit_unused_properties__ __setstate__
    __getstate__ __deepcopy__ __copy__ __reduce__ __reduce_ex__ __jit_ignored_attributes__ __match_args__
    """.split()
)
_SLOTS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_BARE = (object, abc.ABC, typing.Generic)


def is_pure(module: nn.Module, known: dict[nn.Module, str] | None = None) -> bool:
    """Return whether calls of this module, as it is now, write no Python state. ``known``: see `trouble_of`."""
    return not trouble_of(module, known)


def pure_modules(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Return those among ``modules`` that are pure."""
    look = _Look({})
    return {module for module in modules if not look.trouble_of(module)}


def trouble_of(module: nn.Module, known: dict[nn.Module, str] | None = None) -> str:
    """Return why a module is not pure, as text; "" if it is.

    ``known``: recent results for other modules, so that a tree is walked once. It must not outlive a change of the
    model.
    """
    return _Look({} if known is None else known).trouble_of(module)


class _Look:
    """One check of a model. It caches results, since modules contain each other and share classes."""

    def __init__(self, known: dict[nn.Module, str]) -> None:
        self.known = known
        self.running: set[nn.Module] = set()
        self.kinds: dict[type, tuple[str, frozenset[str]]] = {}
        self.code = Analysis(self.module)
        self.torch_is_own: bool | None = None

    def trouble_of(self, module: nn.Module) -> str:
        """As `trouble_of`. Assumptions about recursive functions are made for one module at a time."""
        self.code = Analysis(self.module)
        try:
            self.module(module)
        except Impure as found:
            return str(found)
        return ""

    def module(self, module: nn.Module) -> None:
        """Check a module. Raises `Impure`."""
        if module in self.running:
            self.code.assumed = True  # a module that calls itself is as pure as the rest of its code
            return
        if module not in self.known:
            self.running.add(module)
            before = set(self.known)
            try:
                self._check(module)
                self.known[module] = ""
            except (Impure, RecursionError) as found:
                if self.code.assumed:  # results for others on the way may rely on the one that has just failed
                    for other in set(self.known) - before:
                        del self.known[other]
                is_known = isinstance(found, Impure)
                self.known[module] = str(found) if is_known else "its modules are nested too deeply"
            finally:
                self.running.discard(module)
        if self.known[module]:
            raise Impure(self.known[module])

    def _check(self, module: nn.Module) -> None:
        kind = type(module)
        if kind not in self.kinds:
            self.kinds[kind] = _trouble_of_class(kind), _descriptors(kind)
        trouble, descriptors = self.kinds[kind]
        if trouble:
            raise Impure(trouble)
        _check_instance(module, descriptors)
        forward = kind.forward
        if _is_torchs(forward):
            self._check_torchs_own(module)
        else:
            self.code.function(forward, module)

    def _check_torchs_own(self, module: nn.Module) -> None:
        """Check that torch's forward finds nothing on the module that writes state."""
        kind = type(module).__qualname__
        if self.torch_is_own is None:
            self.torch_is_own = _torch_is_own()
        if not self.torch_is_own:
            raise Impure("functions of torch are replaced")
        for base in type(module).__mro__:
            if not _is_torch_class(base):
                _check_only_extends(base, kind)
        for name, value in list(vars(module).items()):  # other threads may hook it meanwhile
            is_shim = isinstance(value, Shim) or is_of_class(module, value)
            if name not in _MODULE_OWN and not is_shim and not _is_inert(value):
                raise Impure(f"{kind}.{name} is a {type(value).__name__}")
        for child in module._modules.values():
            if child is not None:
                self.module(child)


_seen: tuple[list[Any], bool] = [], False
"""What torch's names referred to when its functions were last checked, and whether these were its own."""


def _torch_is_own() -> bool:
    """Return whether none of torch's functions is replaced. They are checked again once any name refers to another
    object.
    """
    global _seen
    spaces = [list(vars(space).values()) for space in (torch, torch.nn.functional)]
    values, (known, own) = [*spaces[0], *spaces[1]], _seen
    if len(known) != len(values) or not all(map(operator.is_, known, values)):
        listed = torch_functions()
        functions = [one for one in values if id(one) in listed]
        functions += [one for one in spaces[1] if isinstance(one, types.FunctionType)]
        own = all(map(torch_own, functions))
        _seen = values, own
    return own


def _descriptors(kind: type) -> frozenset[str]:
    """Return names of descriptors of the class, such as methods."""
    return frozenset(
        name for base in kind.__mro__ for name, value in vars(base).items() if hasattr(type(value), "__get__")
    )


def _check_instance(module: nn.Module, descriptors: frozenset[str]) -> None:
    kind = type(module).__qualname__
    if any(getattr(module, hooks) for hooks in _HOOKS):
        raise Impure(f"{kind} has hooks")
    if any(getattr(nn.modules.module, hooks, None) for hooks in _GLOBAL_HOOKS):
        raise Impure("hooks are set for all modules")
    own = vars(module)
    if own.get(COMPILED) is not None:
        raise Impure(f"{kind} is compiled")
    for name, value in list(own.items()):  # other threads may hook it meanwhile
        if name == "forward" and isinstance(value, Shim):
            ours = value.module is module and value.before is _ABSENT
            if ours and getattr(value.forward, "__func__", None) is type(module).forward:
                continue
        if name == "forward" and is_of_class(module, value):
            continue
        if name in _MACHINERY and value is not None:
            raise Impure(f"{kind} has another {name} than its class")
        if name in descriptors:
            raise Impure(f"{kind} has another {name} than its class")
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None and not is_plain(tensor):
                raise Impure(f"{kind}.{name} is a {type(tensor).__name__}")


def _trouble_of_class(kind: type) -> str:
    for base in kind.__mro__:
        if base in _BARE:
            continue
        if _is_torch_class(base):
            for name, value in vars(base).items():
                # libraries add methods to nn.Module and wrap its __init__: only the steps of a call count
                counts = name in _MACHINERY or name in _CALLED if base is nn.Module else name not in _HARMLESS
                if not counts:
                    continue
                inner = getattr(value, "__func__", getattr(value, "fget", value))
                runs = callable(inner) or (hasattr(type(inner), "__get__") and not isinstance(inner, _SLOTS))
                if runs and not isinstance(inner, type) and not _is_torchs(inner):
                    return f"{base.__qualname__}.{name} is not torch's own"
            continue
        for name, value in vars(base).items():
            if (name.startswith("__") and name.endswith("__") and name not in _HARMLESS) or name in _MACHINERY:
                return f"{base.__qualname__} has a {name} of its own"
            if name in _MODULE_OWN and hasattr(type(value), "__get__"):
                return f"{base.__qualname__} has a {name} of its own"
    if not isinstance(kind.__dict__.get("forward", getattr(kind, "forward", None)), types.FunctionType):
        return f"{kind.__qualname__} has a forward that is no function"
    return ""


def _check_only_extends(base: type, kind: str) -> None:
    """Check that a class that inherits torch's forward does not change what that forward uses."""
    if base in _BARE:
        return
    for name, value in vars(base).items():
        inherited = any(name in vars(other) for other in base.__mro__[1:] if _is_torch_class(other))
        described = hasattr(type(value), "__get__") and not isinstance(value, types.FunctionType)
        if name not in _HARMLESS and name != "extra_repr" and (inherited or described):
            raise Impure(f"{kind} has a {name} of its own, which torch's forward may use")


def _is_torch_class(kind: type) -> bool:
    if not kind.__module__.startswith("torch.nn.modules."):
        return False
    return vars(sys.modules.get(kind.__module__, types)).get(kind.__name__) is kind


def _is_torchs(function: Any) -> bool:
    """Return whether it is a function of ``torch.nn`` that holds nothing from elsewhere."""
    return (
        isinstance(function, types.FunctionType)
        and function.__code__.co_filename.startswith(_TORCH_NN)
        and torch_own(function)
    )


def _is_inert(value: Any, depth: int = 3) -> bool:
    """Return whether it is what torch's own modules keep: numbers, text, tensors, lists of those, torch's functions as
    activations.
    """
    if is_plain(value) or isinstance(value, weakref.ref) or value is None:
        return True
    if type(value) in (list, tuple) and depth:
        return all(_is_inert(item, depth - 1) for item in value)
    if type(value) is dict and depth:
        return all(is_plain(key) and _is_inert(item, depth - 1) for key, item in value.items())
    return id(value) in torch_functions() and torch_own(value)


def is_safe(value: Any) -> bool:
    """Return whether a module can affect this argument only by an operation, as `is_pure` assumes."""
    if type(value) is tuple:
        return all(map(is_safe, value))
    return value is None or type(value) in (bool, int, float, str, torch.Tensor, nn.Parameter, Placeholder)
