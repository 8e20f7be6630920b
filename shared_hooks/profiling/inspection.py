"""One more forward, looked into instead of timed: the memory its tensors hold, and its multiplications, by layer.

A dispatch mode sees every tensor that operations return, and keeps a ledger of the storages that are alive. Exact for
tensors; what a kernel uses for itself while it runs is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from shared_hooks.metrics import TensorShape
from shared_hooks.modules import ModuleInfo, attach, fast_path_off, running
from shared_hooks.tensors import dtype_name, tensors_in

NOTE = "bytes of tensors alive in one forward: inputs included, weights not, kernels' scratch space not seen"


@dataclass
class Inspected:
    """A layer call. Bytes of storages alive when it ended (``allocated``), at most while it ran (``peak``), and at most
    since the forward began (``peak_so_far``).
    """

    module_type: str
    outputs: tuple[TensorShape, ...] = ()
    allocated: int = 0
    peak: int = 0
    peak_so_far: int = 0
    features: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Inspection:
    """``peak``: of the whole forward."""

    layers: tuple[Inspected, ...]
    peak: int


class Ledger(TorchDispatchMode):
    """Storages alive, but for those in ``known``; and multiply-accumulates of the operations that torch can count."""

    def __init__(self, known: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.known = {tensor.untyped_storage()._cdata for tensor in known if _plain(tensor)}
        self.macs = 0.0
        self.add(inputs)
        self.peak = self.peak_so_far = self.held()

    def held(self) -> int:
        """Bytes alive now."""
        for key in [key for key, (storage, _) in self.alive.items() if storage.expired()]:
            del self.alive[key]
        return sum(nbytes for _, nbytes in self.alive.values())

    def add(self, tensors: list[torch.Tensor]) -> None:
        """Enter what is not yet entered."""
        for tensor in tensors:
            if not _plain(tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self.known:
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def begin(self) -> None:
        """A module is called: its own peak starts here."""
        self.peak = self.held()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.add(list(tensors_in(result)) if not isinstance(result, torch.Tensor) else [result])
        held = self.held()
        self.peak = max(self.peak, held)
        self.peak_so_far = max(self.peak_so_far, held)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            try:
                self.macs += count(*args, **kwargs, out_val=result) / 2
            except Exception:  # torch's formula does not know this form of the call: not counted
                pass
        return result


class Inspector:
    """Stands where a session stands (`attach.Runner`), numbers layers by the same rule, and reads the ledger."""

    is_bare = False

    def __init__(self, modules: Mapping[nn.Module, ModuleInfo], ledger: Ledger) -> None:
        self.modules = modules
        self.ledger = ledger
        self.layers: list[Inspected] = []
        self.parents: list[bool] = []  # of every running module: has it a hooked child?
        self.failure: BaseException | None = None

    def failed(self, error: BaseException) -> None:
        self.failure = self.failure or error

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        info = self.modules.get(module)
        if info is None:
            return forward(*args, **kwargs)
        if self.parents:
            self.parents[-1] = True
        self.parents.append(False)
        ledger = self.ledger
        ledger.begin()
        macs = ledger.macs
        try:
            output = forward(*args, **kwargs)
        finally:
            has_child = self.parents.pop()
        if not has_child:
            inputs, outputs = list(tensors_in((args, kwargs))), list(tensors_in(output))
            features = {
                "input_elements": float(sum(tensor.numel() for tensor in inputs)),
                "output_elements": float(sum(tensor.numel() for tensor in outputs)),
                "parameters": float(sum(weight.numel() for weight in module.parameters())),
            }
            if ledger.macs > macs:
                features["macs"] = ledger.macs - macs
            shapes = tuple(TensorShape(dtype_name(tensor.dtype), tuple(tensor.shape)) for tensor in outputs)
            layer = Inspected(info.module_type, shapes, ledger.held(), ledger.peak, ledger.peak_so_far, features)
            self.layers.append(layer)
        return output


def inspect(
    model: nn.Module, modules: Mapping[nn.Module, ModuleInfo], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Inspection:
    """Run the whole model once. Raises what the model raises."""
    ledger = Ledger([*model.parameters(), *model.buffers()], list(tensors_in((args, kwargs))))
    inspector = Inspector(modules, ledger)
    token = running.set(inspector)
    for module in modules:
        attach.attach(module)
    try:
        with torch.no_grad(), fast_path_off(), ledger:
            model(*args, **kwargs)
    finally:
        running.reset(token)
        for module in modules:
            attach.detach(module)
    if inspector.failure is not None:
        raise inspector.failure
    return Inspection(tuple(inspector.layers), ledger.peak_so_far)


def weights_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, each storage once."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if _plain(tensor)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def _plain(tensor: torch.Tensor) -> bool:
    """Whether it has one storage; sparse and nested tensors and some subclasses have none to count."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return False
    try:
        return tensor.untyped_storage().nbytes() >= 0
    except (NotImplementedError, RuntimeError):
        return False
