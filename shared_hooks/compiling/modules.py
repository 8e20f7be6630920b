"""One module, compiled apart from the model it belongs to: torch.compile of a twin with the same weights.

The twin has no shims and no hooks, and nothing the model does to itself later reaches it; so only a module that
provably writes no state and has no hooks has one. It is compiled for the first form of its arguments and for no other:
another one runs the module itself, and gives the twin up.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shared_hooks.errors import ServerUnavailable
from shared_hooks.modules.attach import shim_of
from shared_hooks.purity.modules import trouble_of
from shared_hooks.tensors import Structure, flatten, unflatten

# What a module launches on a GPU, recorded once as a CUDA graph and replayed: one launch instead of many.
#
# A graph works in memory of its own: arguments are copied in, results are copied out, and one call runs at a time.
# Whatever cannot be recorded runs as it is.

log = logging.getLogger(__name__)

WARM_RUNS = 3
"""Before a recording: libraries choose kernels and take memory in their first runs."""


class Graphed:
    """Stands for ``run``, a function of tensors on one GPU. Any thread may call."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._form: Structure = []
        self._inputs: list[torch.Tensor] = []
        self._result: tuple[Structure, list[torch.Tensor]] = [], []
        self._refused = not torch.cuda.is_available()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        form, tensors = flatten((args, kwargs))
        with self._lock:
            if self._graph is None and not self._refused:
                self._record(form, tensors)
            if self._graph is not None and self._takes(form, tensors):
                for mine, given in zip(self._inputs, tensors, strict=True):
                    mine.copy_(given)
                self._graph.replay()
                structure, results = self._result
                return unflatten(structure, [one.clone() for one in results])
        return self._run(*args, **kwargs)

    def _takes(self, form: Structure, tensors: list[torch.Tensor]) -> bool:
        """Whether these are of the form that was recorded."""
        same = form == self._form and len(tensors) == len(self._inputs)
        return same and all(
            (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
            for a, b in zip(self._inputs, tensors, strict=True)
        )

    def _record(self, form: Structure, tensors: list[torch.Tensor]) -> None:
        device = next((one.device for one in tensors if one.device.type == "cuda"), None)
        if device is None or any(one.device != device for one in tensors):
            self._refused = True
            return
        inputs = [one.clone(memory_format=torch.preserve_format) for one in tensors]
        args, kwargs = unflatten(form, inputs)
        try:
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for _ in range(WARM_RUNS):
                    self._run(*args, **kwargs)
            torch.cuda.current_stream(device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # other threads go on meanwhile
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                result = self._run(*args, **kwargs)
            self._form, self._inputs, self._result = form, inputs, flatten(result)
            self._graph = graph
        except Exception as error:  # whatever a model does that cannot be recorded
            log.info("no CUDA graph: %s: %s", type(error).__name__, error)
            self._refused = True


HOOKS = ("_forward_hooks", "_forward_pre_hooks")
BOUNDED = {"isolate_recompiles", "recompile_limit"}
"""Options of torch.compile: without them nothing keeps a request from compiling."""
MAX_REASON = 300
"""Characters of a compiler's error."""


class CompiledModule:
    """Stands for one module in tails (`TailSession.substitutes`). Any thread may call, once `build` has."""

    def __init__(self, module: nn.Module, backend: str) -> None:
        """``backend``: torch.compile's."""
        self.why = trouble(module)
        """Why the module runs as it is; empty where its twin does."""
        shims = [shim_of(one) for one in module.modules()]
        self._shims = [shim for shim in shims if shim is not None]
        self._twin: Callable[..., Any] | None = None
        self._building = True
        if not self.why:
            options: dict[str, Any] = {"recompile_limit": 1, "isolate_recompiles": True}
            self._twin = torch.compile(twin(module), fullgraph=True, dynamic=False, backend=backend, **options)

    def built(self, *, graphs: bool) -> None:
        """What it was called with so far is all there is: from now on nothing is compiled. ``graphs``: on a GPU what it
        launches is replayed as a CUDA graph.
        """
        self._building = False
        if graphs and self._twin is not None:
            self._twin = Graphed(self._twin)

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module's ``forward`` gives. Raises ServerUnavailable where the twin broke in the middle: what it had
        written to nobody knows, and the same request may be asked again.
        """
        twin = self._twin
        if twin is None or any(shim.watching is not None or shim.gate is not None for shim in self._shims):
            return forward(*args, **kwargs)
        try:
            return twin(*args, **kwargs)
        except Exception as error:  # of the compiler, of its kernels, or the model's own
            self._twin = None
            self.why = f"{type(error).__name__}: {error}"[:MAX_REASON]
            if self._building or type(error).__name__ == "FailOnRecompileLimitHit":  # nothing has run yet
                return forward(*args, **kwargs)
            log.error("a compiled module is given up", exc_info=error)
            raise ServerUnavailable("a compiled part of the model failed, and is used no more; ask again") from error


def trouble(module: nn.Module) -> str:
    """Why a module cannot be compiled apart from its model; "" if it can."""
    if not set(inspect.signature(torch.compile).parameters) >= BOUNDED:
        return f"torch {torch.__version__} cannot be kept from compiling again"
    for name, one in module.named_modules():
        if any(getattr(one, hooks) for hooks in HOOKS):
            return f"{name or 'it'} has hooks"
    return trouble_of(module)


def twin(module: nn.Module) -> nn.Module:
    """A copy of the module with the same parameters and buffers, and no shims."""
    shared = {id(one): one for one in itertools.chain(module.parameters(), module.buffers())}
    found = copy.deepcopy(module, dict[int, Any](shared))
    for one in found.modules():
        one.__dict__.pop("forward", None)  # a method of its own, where the module has a shim
    return found
