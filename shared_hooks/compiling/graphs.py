"""What a module launches on a GPU, recorded once as a CUDA graph and replayed: one launch instead of many.

A graph works in memory of its own: arguments are copied in, results are copied out, and one call runs at a time.
Whatever cannot be recorded runs as it is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from shared_hooks.tensors import Structure, flatten, unflatten

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
