"""Two modes that look at the same run, for planning only.

`TorchFunctionMode` sees the calls the model's Python makes: their order is what the tail will meet again, so operations
are numbered there. `TorchDispatchMode` sees what the kernels below read and write, element by element, and anything
that runs out of the function mode's sight.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks.recording.operations import OperationLog


class Functions(TorchFunctionMode):
    def __init__(self, log: OperationLog) -> None:
        super().__init__()
        self.log = log

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        log = self.log
        if log.muted or log.op is not None or log.in_opaque:
            return func(*args, **(kwargs or {}))
        return log.operation(func, args, kwargs or {})


class _Kernels(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch shields the method below from its compiler, which it imports for that: more than a second."""
        return False

    def __init__(self, log: OperationLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = log

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        log = self.log
        if log.muted:
            return func(*args, **(kwargs or {}))
        # our own look at tensors, and the call below, come back through the function mode
        log.muted = True
        try:
            return log.kernel(func, args, kwargs or {})
        finally:
            log.muted = False


class _ShieldedKernels(_Kernels):
    """For a process in which torch's compiler is at work."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, kinds, args, kwargs)


def kernels(log: OperationLog) -> TorchDispatchMode:
    return (_ShieldedKernels if "torch._dynamo" in sys.modules else _Kernels)(log)
