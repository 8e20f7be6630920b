"""Follow a run along the plan's path, where Python reads data and may go another way.

Names of operations are not enough: a number read from data may choose which of two tensors an operation takes, where a
slice begins, what a module returns. So every argument and result is compared with the plan: the same place in the same
storage, storages being told apart by the order in which they appear.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shared_hooks.recording import ModuleCall, Op, Storage, Trace, Value
from shared_hooks.tensors import UnknownHolder, View, flatten


def form_of_result(structure: Any) -> Any:
    """A structure without its numbers: modules that return those are never skipped, and each input has others."""
    if isinstance(structure, list):
        if len(structure) == 2 and structure[0] == "v" and not (structure[1] is None or isinstance(structure[1], str)):
            return ["v"]
        return [form_of_result(part) for part in structure]
    return structure


def footprint(value: Value) -> tuple[Any, ...]:
    """Where a value of the plan lies, comparable between two plans."""
    if value.storage.outside:
        return ("outside", value.shape)
    return (value.storage.index, value.storage.elements, value.view)


class Follower:
    """Compares one run, step by step, with a trace. Each method says whether the run is still on the path."""

    def __init__(self, trace: Trace, inputs: list[torch.Tensor]) -> None:
        self.storages: dict[int, Storage] = {}
        self.bases: dict[int, int] = {}
        self.keys: dict[Storage, int] = {}
        # an address must not be used again while it stands for a storage
        self.alive: list[StorageWeakRef] = []
        for tensor, value in zip(inputs, trace.inputs, strict=True):
            if not value.storage.opaque:
                self.bases[tensor.untyped_storage()._cdata] = int(tensor.storage_offset()) - value.view.offset
                self._same(tensor, value)

    @classmethod
    def of_storages(cls, slots: Mapping[Storage, torch.Tensor]) -> Follower:
        """Of a run that begins in the middle: flat tensors that hold the storages of what came before."""
        made = cls.__new__(cls)
        made.storages, made.bases, made.keys, made.alive = {}, {}, {}, []
        for storage, slot in slots.items():
            untyped = slot.untyped_storage()
            made.storages[untyped._cdata], made.keys[storage] = storage, untyped._cdata
            made.bases[untyped._cdata] = int(slot.storage_offset())
            made.alive.append(StorageWeakRef(untyped))
        return made

    def operation(self, op: Op, arguments: list[torch.Tensor], results: list[torch.Tensor]) -> bool:
        """One torch function."""
        if len(arguments) != len(op.args) or len(results) != len(op.results):
            return False
        # an argument that changed its shape in place is seen as it is afterwards
        return (op.reshapes or all(map(self._same, arguments, op.args))) and all(map(self._same, results, op.results))

    def call(self, call: ModuleCall, output: Any) -> bool:
        """What one module returns."""
        try:
            structure, tensors = flatten(output, plain=True)
        except UnknownHolder:
            return call.structure is None
        if call.structure is None or form_of_result(structure) != form_of_result(call.structure):
            return False
        return all(map(self._same, tensors, call.results))

    def _same(self, tensor: torch.Tensor, value: Value) -> bool:
        storage = value.storage
        if storage.outside or storage.opaque:
            return tuple(tensor.shape) == value.shape
        try:
            untyped = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):
            return False
        key = untyped._cdata
        if key not in self.storages:
            if storage in self.keys:
                return False
            self.storages[key] = storage
            self.keys[storage] = key
            self.alive.append(StorageWeakRef(untyped))
        return self.storages[key] is storage and View.of(tensor, self.bases.get(key, 0)) == value.view
