"""What counts as an operation at the level of torch functions, and what at the level below reads or writes data.

Recording, the head and the tail number operations by the same rule, so the rule lives here: it may depend only on the
function's name, its arguments and its result.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Non-tensor results that say something about a tensor's form, never about its values.
_FORM_TYPES = (torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format)
_FORM_NAMES = frozenset(
    """
    size dim ndim stride numel nelement ndimension dim_order element_size itemsize nbytes shape dtype layout device
    is_contiguous is_floating_point is_complex is_signed is_inference is_conj is_neg is_pinned is_set_to is_same_size
    is_coalesced is_sparse is_quantized is_nested is_distributed is_tensor is_shared is_cuda is_cpu is_mps is_meta
    is_xpu is_mkldnn is_vulkan is_leaf storage_offset get_device type has_names names requires_grad retains_grad
    output_nr grad grad_fn volatile sparse_dim dense_dim can_cast result_type
    _version _is_view _is_zerotensor __len__ __hash__
    """.split()
)
# Functions that hand the bytes to code torch cannot see.
_ESCAPES = frozenset(
    """
    numpy data_ptr const_data_ptr mutable_data_ptr untyped_storage storage _typed_storage __array__ __dlpack__ to_dlpack
    __cuda_array_interface__ _cdata
    """.split()
)
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
# Functions that want the form of an argument that they hand to no kernel.
FORM_OF_OTHERS = frozenset(
    """
    expand_as view_as reshape_as type_as to sum_to_size resize_as_ new_tensor unflatten broadcast_tensors meshgrid
    """.split()
)


# Comparisons that Python may call with the operands changed round.
REFLECTED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}


def is_foreign(func: Any) -> bool:
    """Whether a kernel is somebody else's, of which the schema alone is known."""
    return func.namespace not in _OWN


def shape_from_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    """Whether the form of what a kernel gave may depend on what it read.

    torch tags its own; of an operation of anybody else's the form must come out of a run without data (on ``meta``).
    """
    if func._schema.name == "aten::index":  # tagged for its masks
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if torch.Tag.dynamic_output_shape in func.tags or func._schema.name in _SHAPED_BY_DATA:
        return True
    if not is_foreign(func):
        return False
    try:
        with torch.no_grad():
            formal = func(*_on_meta(args), **_on_meta(kwargs))
    except Exception:  # no such kernel, or one that says that it needs data
        return True
    return [tensor.shape for tensor in tensors_of(formal)] != [tensor.shape for tensor in tensors_of(result)]


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)(_on_meta(item) for item in value)
    if isinstance(value, dict):
        return {key: _on_meta(item) for key, item in value.items()}
    return torch.device("meta") if isinstance(value, torch.device) else value


class Kind(enum.Enum):
    """How one call of a torch function is treated."""

    FORM = "reads no data: shapes, dtypes, devices"
    TENSOR = "gives tensors"
    VALUE = "gives a Python value read from data"
    EFFECT = "gives nothing: writes in place, or asserts"


def name_of(func: Callable[..., Any]) -> str:
    """A name for a torch function, the same in every process; property getters get the property's name."""
    name = getattr(func, "__name__", "") or type(func).__name__
    if name in ("__get__", "__set__"):
        owner = getattr(func, "__self__", None)
        return f"{getattr(owner, '__name__', '?')}.{name}"
    return name


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of a torch function, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, slice):
        yield from tensors_of((value.start, value.stop, value.step))


def arguments_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors in positional and keyword arguments, in order."""
    found = [tensor for value in args for tensor in tensors_of(value)]
    if kwargs:
        found += [tensor for value in kwargs.values() for tensor in tensors_of(value)]
    return found


def literals_of(value: Any) -> Any:
    """The arguments that are no tensors, as JSON: what a function was told. Devices are left out, they may differ."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (list, tuple)):
        return [literals_of(item) for item in value]
    if isinstance(value, dict):
        return {str(key): literals_of(item) for key, item in value.items()}
    if isinstance(value, slice):
        return ["slice", literals_of((value.start, value.stop, value.step))]
    if isinstance(value, (torch.dtype, torch.memory_format)):
        return str(value)
    return "tensor" if isinstance(value, torch.Tensor) else type(value).__name__


def is_made_from_numbers(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a function copies what it is given outside torch's sight; ``as_tensor`` may take memory as it is."""
    if name in ("as_tensor", "asarray"):
        return bool(args) and isinstance(args[0], (bool, int, float, complex, list, tuple))
    return name in ("tensor", "new_tensor")


def is_mapped(tensors: list[torch.Tensor]) -> bool:
    """Whether a tensor is a wrapper of ``torch.func`` (vmap): such calls are looked through, to the kernels below."""
    return any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors)


def kind_of(name: str, has_tensors: bool, result: Any) -> Kind:
    """The treatment of a call with this result; ``has_tensors``: whether a tensor was among its arguments."""
    if isinstance(result, torch.Tensor):
        return Kind.TENSOR
    if result is None:
        # what gives nothing writes, or reads (an assertion); but for properties that are not there
        return Kind.EFFECT if has_tensors and not name.endswith(".__get__") and not is_form(name) else Kind.FORM
    if (
        isinstance(result, (list, tuple))
        and not isinstance(result, torch.Size)
        and next(tensors_of(result), None) is not None
    ):
        return Kind.TENSOR
    if not has_tensors or result is NotImplemented or isinstance(result, _FORM_TYPES) or is_form(name):
        return Kind.FORM
    return Kind.VALUE


def is_form(name: str) -> bool:
    """Whether the name alone tells that no data is read."""
    return name.removesuffix(".__get__") in _FORM_NAMES


def is_escape(name: str) -> bool:
    """Whether the function hands a tensor's bytes to code that torch cannot see (NumPy, raw pointers)."""
    return name.removesuffix(".__get__") in _ESCAPES
