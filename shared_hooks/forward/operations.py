"""What counts as an operation at the level of torch functions, and what reads or writes data at the level below.

Recording, head and tail number operations by the same rule, which is defined here: it may depend only on the function's
name, its arguments and its result.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Non-tensor results that depend on a tensor's form only, never on its values.
_FORM_TYPES = (torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format)
_FORM_NAMES = frozenset(
    """
    size dim ndim stride numel nelement ndimension dim_order element_size itemsize nbytes shape dtype layout device
    is_contiguous is_floating_point is_complex is_signed is_inference is_conj is_neg is_pinned is_set_to is_same_size
    is_coalesced is_sparse is_quantized is_nested is_distributed is_tensor is_shared is_cuda is_cpu is_mps is_meta
    is_xpu is_mkldnn is_vulkan is_leaf get_device type has_names names requires_grad retains_grad
    output_nr grad grad_fn volatile sparse_dim dense_dim can_cast result_type
    _version _is_view _is_zerotensor __len__ __hash__
    """.split()
)
# ... those that Python calls most often, by the function's whole name: on a dense tensor they neither fail nor run
# any kernel.
HEADS = frozenset(
    """
    size dim stride numel nelement element_size is_floating_point is_complex shape.__get__ ndim.__get__
    dtype.__get__ device.__get__ layout.__get__ requires_grad.__get__ is_cuda.__get__
    """.split()
)
_LITERALS = frozenset({bool, int, float, str})
_NUMBERS = frozenset({bool, int, float, str, torch.Size, torch.dtype, torch.device})
# Functions that pass the bytes to code torch cannot see.
_ESCAPES = frozenset(
    """
    numpy data_ptr const_data_ptr mutable_data_ptr untyped_storage storage _typed_storage __array__ __dlpack__ to_dlpack
    __cuda_array_interface__ _cdata
    """.split()
)
# Functions that give a tensor another's memory, and read neither: with a placeholder, memory that does not exist.
OTHER_MEMORY = frozenset({"data.__set__", "set_"})
# Functions written in Python that copy a tensor's bytes without a kernel.
COPIES_BYTES = frozenset({"__deepcopy__"})


def _aten(names: str) -> frozenset[str]:
    return frozenset("aten::" + name for name in names.split())


# Below the function level: the result depends on the argument's form alone.
FORM_ONLY = _aten(
    """
    zeros_like ones_like full_like empty_like rand_like randn_like randint_like new_zeros new_ones new_full new_empty
    new_empty_strided is_same_size sym_size sym_numel sym_stride
    """
)
# ... the first argument is overwritten without being read.
OVERWRITES = _aten("copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_")
# Namespaces of torch's own, whose operations carry a tag where a shape depends on data, but for those listed here.
_OWN = frozenset({"aten", "prims", "prim", "quantized", "_quantized", "mkldnn", "onednn", "mkldnn_prepacked"})
_SHAPED_BY_DATA = _aten("_local_scalar_dense _pack_padded_sequence to_padded_tensor _padded_dense_to_jagged_forward")
# Functions that need the form of an argument that they pass to no kernel.
FORM_OF_OTHERS = frozenset(
    """
    expand_as view_as reshape_as type_as to sum_to_size resize_as_ new_tensor unflatten broadcast_tensors meshgrid
    """.split()
)


NOTHING, FORM, LAYOUT = 0, 1, 2
"""How much can be foreseen: nothing, shape and dtype, or also strides."""

# Comparisons that Python may call with swapped operands.
REFLECTED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}


def unreflected(name: str) -> str:
    """Return a single name for an operation and its reflected form."""
    return min(name, REFLECTED.get(name, name))


def is_foreign(func: Any) -> bool:
    """Return whether a kernel is another library's, of which only the schema is known."""
    return func.namespace not in _OWN


def shape_from_data(func: Any) -> bool:
    """Return whether the form of the result of one of torch's kernels depends on data."""
    return torch.Tag.dynamic_output_shape in func.tags or func._schema.name in _SHAPED_BY_DATA


def by_truth(args: tuple[Any, ...]) -> bool:
    """Return whether ``aten::index`` has a mask among its indices."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


_PROPERTIES = frozenset({"__get__", "__set__"})


class CallKind(enum.Enum):
    """How a call of a torch function is treated."""

    FORM = "reads no data: shapes, dtypes, devices"
    TENSOR = "gives tensors"
    VALUE = "gives a Python value read from data"
    EFFECT = "gives nothing: writes in place, or asserts"


def name_of(func: Callable[..., Any]) -> str:
    """Return a name for a torch function that is the same in every process; property getters have the
    property's name.
    """
    name = getattr(func, "__name__", "") or type(func).__name__
    if name in _PROPERTIES:
        owner = getattr(func, "__self__", None)
        return f"{getattr(owner, '__name__', '?')}.{name}"
    return name


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Return the tensors among the arguments of a torch function, in order."""
    return iter(arguments_of((value,), {}))


def arguments_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors in positional and keyword arguments, in order."""
    found: list[torch.Tensor] = []
    _gather(args, found)
    if kwargs:
        _gather(kwargs.values(), found)
    return found


def _gather(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    for value in values:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            found.append(value)
        elif value is None or kind in _NUMBERS:
            continue
        elif isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _gather(value, found)
        elif isinstance(value, dict):
            _gather(value.values(), found)
        elif isinstance(value, slice):
            _gather((value.start, value.stop, value.step), found)


def literals_of(value: Any) -> Any:
    """Return the arguments that are no tensors, as JSON, without devices, which may differ."""
    if value is None or type(value) in _LITERALS:
        return value
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, (list, tuple)):
        return [literals_of(item) for item in value]
    if isinstance(value, dict):
        return {str(key): literals_of(item) for key, item in value.items()}
    if isinstance(value, slice):
        return ["slice", literals_of((value.start, value.stop, value.step))]
    if isinstance(value, (torch.dtype, torch.memory_format)):
        return str(value)
    return type(value).__name__


def is_dense(tensor: Any) -> bool:
    """Return whether this is a strided tensor of torch's own class."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return False
    return tensor.layout == torch.strided and not tensor.is_nested


def is_made_from_numbers(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether a function copies its argument outside torch's sight; ``as_tensor`` may share memory."""
    if name in ("as_tensor", "asarray"):
        return bool(args) and isinstance(args[0], (bool, int, float, complex, list, tuple))
    return name in ("tensor", "new_tensor")


def is_mapped(tensors: list[torch.Tensor]) -> bool:
    """Return whether a tensor is a wrapper of ``torch.func`` (vmap): such calls are observed at the level of
    kernels.
    """
    return any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))


def kind_of(name: str, has_tensors: bool, result: Any) -> CallKind:
    """Return how a call with this result is treated; ``has_tensors``: a tensor was among its arguments."""
    if isinstance(result, torch.Tensor):
        return CallKind.TENSOR
    if result is None:
        # an operation without a result writes, or reads (an assertion); except for properties that do not exist
        return CallKind.EFFECT if has_tensors and not name.endswith(".__get__") and not is_form(name) else CallKind.FORM
    if (
        isinstance(result, (list, tuple))
        and not isinstance(result, torch.Size)
        and next(tensors_of(result), None) is not None
    ):
        return CallKind.TENSOR
    if not has_tensors or result is NotImplemented or isinstance(result, _FORM_TYPES) or is_form(name):
        return CallKind.FORM
    return CallKind.VALUE


def is_form(name: str) -> bool:
    """Return whether the name implies that no data is read."""
    return name.removesuffix(".__get__") in _FORM_NAMES


def is_escape(name: str) -> bool:
    """Return whether the function passes a tensor's bytes to code that torch cannot see (NumPy, raw pointers)."""
    return name.removesuffix(".__get__") in _ESCAPES


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a kernel writes in place."""
    if not func._schema.is_mutable:
        return []
    found: list[torch.Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += arguments_of((value,), {})
    return found


# Memory that outlives a model's forward is restored after trial runs, and after runs that left the plan.
#
# Parameters are too many to be copied for every plan, so a storage is copied before the first kernel that writes to
# it. For planning, buffers are copied beforehand (`copies.Buffers`): batch normalisation writes to its own without
# raising a version.


class MemoryKept(TorchDispatchMode):
    """Records writes to the storages of ``tensors`` while active; `restore` undoes them."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tells torch that the method below needs no protection from its compiler, whose import takes over a second."""
        return False

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own: dict[int, torch.Tensor] = {}
        self._was: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        for tensor in tensors:
            key = _key(tensor)
            if key is not None:
                alias = tensor.detach()
                self._own[key] = alias
                self._was.append((tensor, alias, key))

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written_by(func, args, kwargs or {}):
            self._keep(tensor)
        return func(*args, **kwargs) if kwargs else func(*args)

    def _keep(self, tensor: torch.Tensor) -> None:
        key = _key(tensor)
        if key in self._own and key not in self._before:
            storage = tensor.untyped_storage()
            self._before[key] = storage, storage.clone()

    def changed(self) -> set[int]:
        """Return the storages whose bytes have changed, or whose tensor uses other memory now, by address."""
        found = {key for key, (now, before) in self._before.items() if not _same_bytes(now, before)}
        return found | {key for tensor, _, key in self._was if _key(tensor) != key}

    def restore(self) -> None:
        """Restore the bytes, and the memory of every tensor."""
        with torch.no_grad():
            for storage, before in self._before.values():
                if storage.nbytes() == before.nbytes():
                    storage.copy_(before, non_blocking=False)
            for tensor, alias, key in self._was:
                if _key(tensor) != key:
                    tensor.data = alias


def _same_bytes(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    flat = [torch.empty(0, dtype=torch.uint8, device=part.device).set_(part) for part in (one, other)]
    return torch.equal(*flat)


def _key(tensor: torch.Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, ValueError):
        return None
