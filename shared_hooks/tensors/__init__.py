"""Handle values and memory: nested values, views of a storage, sets of its elements.

trees    nested values <-> a structure and a list of tensors
views    views of a storage, and which part of it they cover
staging  copies, and those to and from a CUDA device

May import errors.
"""

from shared_hooks.tensors.staging import Buffers, bytes_of, copied, held, identical, own_class
from shared_hooks.tensors.trees import (
    DTYPE_NAMES,
    DTYPES,
    PLAIN,
    ClassFinder,
    Structure,
    UnknownHolder,
    class_name,
    classes_of,
    dtype_name,
    dtype_named,
    flatten,
    flatten_inputs,
    form_of,
    is_namedtuple,
    leaves_of,
    no_class,
    tensors_in,
    unflatten,
)
from shared_hooks.tensors.views import LiveSet, View

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "PLAIN",
    "Buffers",
    "ClassFinder",
    "LiveSet",
    "Structure",
    "UnknownHolder",
    "View",
    "bytes_of",
    "class_name",
    "classes_of",
    "copied",
    "dtype_name",
    "dtype_named",
    "flatten",
    "flatten_inputs",
    "form_of",
    "held",
    "identical",
    "is_namedtuple",
    "leaves_of",
    "no_class",
    "own_class",
    "tensors_in",
    "unflatten",
]
