"""`Custom`: your own function looks at modules. It gets copies, and cannot hurt by raising, blocking or returning."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shared_hooks.errors import InputMismatch
from shared_hooks.forward import UNSEEN
from shared_hooks.modules import running
from shared_hooks.observers.base import Observer, Record
from shared_hooks.observers.values import copy_of, parts
from shared_hooks.observers.watching import ObservedCall

Function = Callable[[nn.Module, tuple[Any, ...], Any, str], Any]


@dataclass(frozen=True)
class Seen(Record):
    """``value``: what the function returned."""

    value: Any


class Custom(Observer):
    """One `Seen` for each call for which ``function(module, inputs, output, name)`` returns something.

    ``inputs``: the positional arguments, and after them the dictionary of keyword arguments if there are any; as they
    are after the call, as in PyTorch's hooks. Tensors are copies (``copy=False``: the live ones, not to be written to);
    what is on the other side of a cut is None. Random numbers that the function draws are not missed by the model.

    The function runs in a thread of its own. One that takes longer than ``timeout`` seconds is given up, and the
    observer is switched off. ``timeout=None``: in the model's thread, for as long as it takes.
    """

    def __init__(
        self,
        function: Function,
        targets: Any = None,
        every_n: int = 1,
        max_records: int = 1000,
        copy: bool = True,
        timeout: float | None = 10.0,
        **more: Any,
    ) -> None:
        super().__init__(targets, every_n, max_records, **more)
        if not callable(function):
            raise InputMismatch(f"function is called with (module, inputs, output, name); {function!r} is no function")
        if timeout is not None and not timeout > 0:
            raise InputMismatch(f"timeout is None or seconds, not {timeout!r}")
        self.function = function
        self.copy = copy
        self.timeout = timeout
        self.switched_off = False
        self._worker = Worker()

    def observe(self, call: ObservedCall, name: str, step: int) -> Seen | None:
        if self.switched_off:
            return None
        inputs, output = (*call.args, call.kwargs) if call.kwargs else call.args, call.output
        device = next((tensor.device for _, tensor in parts(output)), torch.device("cpu"))
        inputs = tuple(map(copy_of, inputs)) if self.copy else inputs
        output = copy_of(output) if self.copy else output
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            try:
                value = self._worker.run(lambda: self.function(call.module, inputs, output, name), self.timeout, device)
            except Blocked as error:
                self.switched_off = True
                self.notes = (*self.notes, f"switched off: {error}")
                raise
        return None if value is None else Seen(name, step, value)

    def detached(self, root: nn.Module) -> None:
        self._worker.end()


class Blocked(Exception):
    """A function did not return in time."""


class Worker:
    """A thread that runs one function at a time, for as long as one is willing to wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] | None = None

    def run(self, function: Callable[[], Any], timeout: float | None, device: torch.device) -> Any:
        """What the function returns or raises; `Blocked` after ``timeout`` seconds."""
        if timeout is None:
            return function()
        done = threading.Event()
        found: list[Any] = []
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

        def job() -> None:
            running.set(UNSEEN)
            try:
                with torch.no_grad(), torch.cuda.stream(stream):
                    found.append((function(), None))
            except BaseException as error:
                found.append((None, error))
            done.set()

        with self._lock:
            if self._jobs is None:
                self._jobs = queue.SimpleQueue()
                threading.Thread(target=_work, args=(self._jobs,), name="isthmus-observer", daemon=True).start()
            self._jobs.put(job)
        if not done.wait(timeout):
            self.end()
            raise Blocked(f"the function took longer than {timeout:g} s")
        value, error = found[0]
        if isinstance(error, Exception):
            raise error
        if error is not None:
            raise RuntimeError(f"the function raised {type(error).__name__}: {error}") from error
        return value

    def end(self) -> None:
        """No more jobs; the thread ends after those it has. A later `run` starts another."""
        with self._lock:
            jobs, self._jobs = self._jobs, None
        if jobs is not None:
            jobs.put(None)


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job
