"""What a name in a forward's source may hold, without running it: data, or certain objects. For `purity.code`."""

from __future__ import annotations

import functools
import math
import os
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import get_overridable_functions

_TORCH = torch.__path__[0] + os.sep
_PLAIN = (
    bool, int, float, complex, str, bytes, range, type(...), torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size, torch.Tensor, nn.Parameter,
)  # fmt: skip
_FACTORIES = """
    zeros ones full empty arange linspace logspace eye tensor as_tensor rand randn randint randperm zeros_like ones_like
    full_like empty_like rand_like randn_like complex polar cartesian_prod finfo iinfo is_tensor is_grad_enabled
    is_autocast_enabled tril_indices triu_indices scalar_tensor
"""
# Methods of tensors that do something else than compute: they take functions, hand out memory, set attributes.
_NO_METHODS = frozenset(
    """
    apply_ map_ map2_ backward register_hook register_post_accumulate_grad_hook reinforce requires_grad_ retain_grad
    set_ resize resize_ resize_as resize_as_ resize_as_sparse_ sparse_resize_ sparse_resize_and_clear_ share_memory_
    storage untyped_storage typed_storage storage_type data_ptr const_data_ptr numpy record_stream as_subclass
    module_load detach_ rename_ rename new pin_memory squeeze_ unsqueeze_ t_ transpose_ swapaxes_ swapdims_ as_strided_
    """.split()
)
METHODS = frozenset(
    name for name in dir(torch.Tensor) if name[0] != "_" and callable(getattr(torch.Tensor, name))
) - _NO_METHODS | frozenset(
    # of lists and dictionaries made here, and of text; none can be anybody else's
    "append extend insert keys items get startswith endswith lower upper strip join".split()
)
ATTRIBUTES = frozenset(
    """
    shape dtype device ndim T mT H mH real imag is_cuda is_cpu is_sparse is_quantized is_meta is_mps layout itemsize
    nbytes requires_grad is_leaf type index min max eps tiny smallest_normal bits resolution values indices
    is_floating_point is_complex start stop step
    """.split()
)
FUNCTIONS: tuple[Any, ...] = (
    len, range, int, float, bool, str, complex, min, max, sum, abs, round, divmod, pow, any, all, slice, torch.Size,
    torch.device, *(value for value in vars(math).values() if isinstance(value, types.BuiltinFunctionType)),
)  # fmt: skip
THROUGH: tuple[Any, ...] = (list, tuple, reversed, sorted, iter)
_PREDICATES: tuple[Any, ...] = (
    torch.jit.is_scripting, torch.jit.is_tracing,  # type: ignore[attr-defined]
    torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling,
)  # fmt: skip
CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class Impure(Exception):
    """What is not in the words this file knows; the message says where."""


@functools.cache
def torch_functions() -> dict[int, Any]:
    """torch's functions that take tensors and give tensors or values, and those that make tensors; by identity."""
    spaces = get_overridable_functions()
    found = [function for space, functions in spaces.items() if space is not torch.Tensor for function in functions]
    found += [getattr(torch, name) for name in _FACTORIES.split()] + list(_PREDICATES)
    return {id(function): function for function in found if callable(function)}


def torch_own(function: Any, depth: int = 4) -> bool:
    """Whether a function is torch's, and so are all functions it has wrapped."""
    if isinstance(function, types.FunctionType):
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        inner = [value for value in cells if callable(value) and value is not function and not isinstance(value, type)]
        own = function.__code__.co_filename.startswith(_TORCH) and depth > 0
        return own and all(torch_own(value, depth - 1) for value in inner)
    return isinstance(function, (types.BuiltinFunctionType, type)) or type(function).__module__.startswith("torch")


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def is_plain(value: Any) -> bool:
    """A number, text, plain tensor or a tuple of those: nothing of it runs anybody's code."""
    return type(value) in _PLAIN or value is None or (type(value) is tuple and all(map(is_plain, value)))


@dataclass(frozen=True, eq=False)
class What:
    """What an expression may be: data, certain objects, a tuple of known ``parts``, an iterable over ``each``."""

    data: bool = False
    objects: tuple[Any, ...] = ()
    parts: tuple[What, ...] | None = None
    each: What | None = None

    @property
    def key(self) -> Any:
        parts = None if self.parts is None else tuple(part.key for part in self.parts)
        return self.data, frozenset(map(id, self.objects)), parts, self.each and self.each.key

    @property
    def is_data(self) -> bool:
        """Nothing but data."""
        parts = all(part.is_data for part in self.parts or ())
        return not self.objects and parts and (self.each is None or self.each.is_data)

    @property
    def is_readable(self) -> bool:
        """Data, or lists and dictionaries of data that somebody else has: to be read only."""
        plain = all(type(value) in (list, dict) and listed(value).is_data for value in self.objects)
        parts = all(part.is_readable for part in self.parts or ())
        return plain and parts and (self.each is None or self.each.is_data)


NOTHING, DATA = What(), What(data=True)


def joined(whats: Iterable[What]) -> What:
    """What may be any of these."""
    data = False
    objects: dict[int, Any] = {}
    parts: tuple[What, ...] | None = None
    each: What | None = None
    for what in whats:
        data |= what.data
        objects |= {id(value): value for value in what.objects}
        if what.parts is not None:
            if parts is not None and len(parts) != len(what.parts):
                raise Impure("tuples of different lengths meet")
            parts = what.parts if parts is None else tuple(map(both, parts, what.parts))
        if what.each is not None:
            each = what.each if each is None else both(each, what.each)
    return What(data, tuple(objects.values()), parts, each)


def both(one: What, other: What) -> What:
    return joined((one, other))


def classified(value: Any) -> What:
    """What a value is that the source refers to. None is nothing: whatever is done with it does nothing, or raises."""
    if value is None:
        return NOTHING
    if is_plain(value):
        return DATA
    if type(value) is tuple:
        return What(parts=tuple(map(classified, value)))
    known = (nn.Module, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
    if type(value) in (list, dict) or isinstance(value, known) or id(value) in torch_functions():
        return What(objects=(value,))
    raise Impure(f"it refers to a {type(value).__name__}")


def listed(value: Any) -> What:
    """What going through a list, dictionary or container of modules gives."""
    if type(value) in (list, tuple):
        return joined(map(classified, value))
    if type(value) is dict:
        return joined(map(classified, value))
    if isinstance(value, CONTAINERS) and goes_torchs_way(value):
        return DATA if isinstance(value, nn.ModuleDict) else joined(map(classified, value._modules.values()))
    if type(value) in (nn.ParameterList, nn.ParameterDict):
        return DATA
    raise Impure(f"it goes through a {type(value).__name__}")


def goes_torchs_way(value: nn.Module) -> bool:
    """Whether attributes, and for containers the elements, are found by torch's code and nobody else's."""
    kind = type(value)
    names = ("__iter__", "__getitem__", "__len__") if isinstance(value, CONTAINERS) else ()
    return (
        kind.__getattribute__ is object.__getattribute__
        and kind.__getattr__ is nn.Module.__getattr__
        and not hasattr(kind, "__bool__")
        and all(torch_own(getattr(kind, name)) for name in ("__getattr__", *names))
    )


def elements_of(what: What) -> What:
    """What going through it gives."""
    found = [DATA] if what.data else []
    found += [*map(listed, what.objects), *(what.parts or ())]
    return joined(found + ([what.each] if what.each is not None else []))
