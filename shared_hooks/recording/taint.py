"""Which tensors of one run hang on its inputs, or on random numbers: a coarse look, by whole storages."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks.forward import Kind, arguments_of, is_escape, kind_of, name_of
from shared_hooks.recording.kernels import facts_of, written_by
from shared_hooks.tensors import tensors_in


class Taint(TorchDispatchMode):
    """Active while the model runs on ``inputs``; asked afterwards. ``reads_data``: Python looked at such values;
    ``escaped``: their bytes went to code outside torch, which may have made any tensor of them.
    """

    def __init__(self, inputs: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._marked: dict[int, StorageWeakRef] = {}
        self._values = _Values(self)
        self.reads_data = False
        self.escaped = False
        for tensor in tensors_in(inputs):
            self._mark(tensor)

    def __enter__(self) -> Any:
        self._values.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._values.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = arguments_of(args, kwargs)
        facts = facts_of(func)
        written, unread = written_by(facts, args, kwargs)
        reads = [] if facts.form_only else [tensor for tensor in given if id(tensor) not in unread]
        taints = facts.may_draw or any(map(self.has, reads))
        result = func(*args, **kwargs)
        self.reads_data |= taints and func._schema.name == "aten::_local_scalar_dense"
        for tensor in [*arguments_of((result,), {}), *(tensor for tensor in given if id(tensor) in written)]:
            if taints:
                self._mark(tensor)
            elif id(tensor) in unread and _is_whole(tensor):
                self._marked.pop(_key(tensor), None)
        return result

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether it hangs on the inputs; so does what cannot be told."""
        key = _key(tensor)
        return key in self._marked or key == 0

    def _mark(self, tensor: torch.Tensor) -> None:
        key = _key(tensor)
        if key:
            # a weak reference keeps the address from being used again
            self._marked[key] = StorageWeakRef(tensor.untyped_storage())


def _key(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


class _Values(TorchFunctionMode):
    """Some values are read past the dispatcher: ``tolist``, ``numpy``."""

    def __init__(self, taint: Taint) -> None:
        super().__init__()
        self.taint = taint

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = arguments_of(args, kwargs or {})
        name = name_of(func)
        escapes = is_escape(name)
        if escapes or kind_of(name, bool(given), result) is Kind.VALUE:
            read = any(map(self.taint.has, given))
            self.taint.reads_data |= read
            self.taint.escaped |= read and escapes
        return result
