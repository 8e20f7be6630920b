"""Speed up tails by compiling their modules with torch.compile, checked against the model's own before use.

May import wrapped, and all below it.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import queue
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from shared_hooks import devices
from shared_hooks.crossing import Crossing, EarlyOutput
from shared_hooks.errors import ServerUnavailable
from shared_hooks.modules.attach import shim_of
from shared_hooks.purity.modules import trouble_of
from shared_hooks.tail import Substitutes
from shared_hooks.tensors import Structure, flatten, identical, unflatten
from shared_hooks.wrapped import WrappedModel

__all__ = [
    "TOLERANCE",
    "CompiledTails",
    "Standing",
    "difference",
]


# One module, compiled apart from the model it belongs to: torch.compile of a twin with the same weights. The twin has
# no shims and no hooks, and does not follow later changes of the model's modules; so only a module that provably
# writes no state and has no hooks gets one. It is compiled for the first form of its arguments only: for another form
# the module itself runs, and the twin is dropped.

# What a module launches on a GPU, recorded once as a CUDA graph and replayed: one launch instead of many.
#
# A graph works in memory of its own: arguments are copied in, results are copied out, and one call runs at a time.
# What cannot be recorded runs as it is.

log = logging.getLogger(__name__)

WARM_RUNS = 3
"""Runs before a recording: libraries choose kernels and take memory in their first runs."""


class Graphed:
    """A CUDA graph of ``run``, a function of tensors on one GPU. Thread-safe."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._graph: Any = None
        self._form: Structure = []
        self._inputs: list[torch.Tensor] = []
        self._result: tuple[Structure, list[torch.Tensor]] = [], []
        self._refused = False

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
        """Return whether these have the form that was recorded."""
        same = form == self._form and len(tensors) == len(self._inputs)
        return same and all(
            (a.shape, a.stride(), a.dtype, a.device) == (b.shape, b.stride(), b.dtype, b.device)
            for a, b in zip(self._inputs, tensors, strict=True)
        )

    def _record(self, form: Structure, tensors: list[torch.Tensor]) -> None:
        device = next((one.device for one in tensors if devices.has_graphs(one.device)), None)
        if device is None or any(one.device != device for one in tensors):
            self._refused = True
            return
        inputs = [one.clone(memory_format=torch.preserve_format) for one in tensors]
        args, kwargs = unflatten(form, inputs)
        try:
            graph, result = devices.recorded(device, lambda: self._run(*args, **kwargs), WARM_RUNS)
            self._form, self._inputs, self._result = form, inputs, flatten(result)
            self._graph = graph
        except Exception as error:  # whatever a model does that cannot be recorded
            log.info("no CUDA graph: %s: %s", type(error).__name__, error)
            self._refused = True


HOOKS = ("_forward_hooks", "_forward_pre_hooks")
BOUNDED = {"isolate_recompiles", "recompile_limit"}
"""Options of torch.compile, without which a request might compile."""
MAX_REASON = 300
"""Maximum characters of a compiler's error."""


class CompiledModule:
    """Replaces one module in tails (`TailSession.substitutes`). Thread-safe after `build`."""

    def __init__(self, module: nn.Module, backend: str) -> None:
        """``backend``: torch.compile's."""
        self.why = trouble(module)
        """Why the module runs as it is; empty if compiled."""
        shims = [shim_of(one) for one in module.modules()]
        self._shims = [shim for shim in shims if shim is not None]
        self._twin: Callable[..., Any] | None = None
        self._building = True
        if not self.why:
            options: dict[str, Any] = {"recompile_limit": 1, "isolate_recompiles": True}
            self._twin = torch.compile(twin(module), fullgraph=True, dynamic=False, backend=backend, **options)

    def built(self, *, graphs: bool) -> None:
        """End compilation: only argument forms seen so far are served. ``graphs``: on a GPU its kernels are replayed as
        a CUDA graph.
        """
        self._building = False
        if graphs and self._twin is not None:
            self._twin = Graphed(self._twin)

    def __call__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the module's ``forward`` returns. Raises ServerUnavailable if the compiled copy fails midway:
        what it wrote is unknown, and the same request may be repeated.
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
    """Return why a module cannot be compiled apart from its model; "" if it can."""
    if not set(inspect.signature(torch.compile).parameters) >= BOUNDED:
        return f"torch {torch.__version__} cannot be kept from compiling again"
    for name, one in module.named_modules():
        if any(getattr(one, hooks) for hooks in HOOKS):
            return f"{name or 'it'} has hooks"
    return trouble_of(module)


def twin(module: nn.Module) -> nn.Module:
    """Return a copy of the module with the same parameters and buffers, without shims."""
    shared = {id(one): one for one in itertools.chain(module.parameters(), module.buffers())}
    found = copy.deepcopy(module, dict[int, Any](shared))
    for one in found.modules():
        one.__dict__.pop("forward", None)  # an instance's own method, where the module has a shim
    return found


# The compiled tails of one model: made in the background, compared with its own, used, dropped. A tail is identified
# by its cut and the form of the inputs. Compiled modules replace the model's own in it, one by one; everything else
# of the tail is unchanged. Before it is used it must give the model's output on the example and on the values of
# `LIVE` requests, which are answered by the model meanwhile, and it must be faster.

# Which modules of a tail can be compiled: the outermost containers that are called after the cut.
#
# A call that begins after the cut lies wholly after it, whatever other calls of its module do. Leaves are not
# compiled: each is a single kernel, and nothing is gained.


class CompileFinder:
    """Collects modules to compile in a tail (`TailSession.substitutes`), running them as they are."""

    def __init__(self, passed: set[nn.Module]) -> None:
        """``passed``: those that cannot be compiled; modules they call may be."""
        self.found: dict[nn.Module, None] = {}
        self._passed = passed
        self._inside = False

    def __call__(self, module: nn.Module) -> Callable[..., Any] | None:
        if self._inside or module in self._passed or next(module.children(), None) is None:
            return None
        return partial(self._run, module)

    def _run(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.found[module] = None
        self._inside = True
        try:
            return forward(*args, **kwargs)
        finally:
            self._inside = False


# Two outputs of one tail: the same bits, or equal within rounding.

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Tolerance of rounding: the largest difference of two elements over the largest magnitude in the tensor. Complex
numbers count as their parts; all else must be equal.
"""


def difference(mine: Any, theirs: Any, *, rounding: bool) -> str:
    """Return in words how two results differ beyond the tolerance, which is 0 without ``rounding``; "" if they
    do not.
    """
    if identical(mine, theirs):
        return ""
    if not rounding:
        return "the last bits differ"
    (own, tensors), (other, others) = flatten(mine), flatten(theirs)
    if own != other or len(tensors) != len(others):
        return "another structure came out, or other values beside tensors"
    for number, (a, b) in enumerate(zip(tensors, others, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
            return f"tensor {number} has another form"
        if wrong := _unlike(a, b):
            return f"tensor {number}: {wrong}"
    return ""


def _unlike(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    most = TOLERANCE.get(a.dtype)
    if most is None or not a.numel():
        return "" if torch.equal(a, b) else f"{a.dtype} must be equal, and is not"
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return "other elements are not finite"
    a, b = a[finite].double(), b[finite].double()
    if not a.numel():
        return ""
    found = float((a - b).abs().max() / a.abs().max().clamp_min(torch.finfo(torch.float64).tiny))
    return "" if found <= most else f"elements differ by {found:.1e} of the largest, more than {most:g}"


log = logging.getLogger("cloud_server")

LIVE: Final = 3
"""Requests on whose values a tail is compared, after the example."""
MAX_LIVE_BYTES: Final = 64 << 20
"""Maximum bytes of one of them; larger ones are skipped."""
ROUNDS: Final = 3
"""Number of attempts with the modules inside a module that cannot be compiled itself."""
MOST: Final = 64
"""Maximum modules of one tail that are compiled."""

RUNS: Final = 9
"""Runs of each, when both are timed."""

Key = tuple[str, str]
Wins = Callable[[float, float], bool]


def wins(own: float, compiled: float) -> bool:
    """Return whether a twentieth of the time is saved."""
    return compiled < 0.95 * own


class Standing(Enum):
    COMPILING = "compiling"
    CHECKING = "checking"  # right on the example, compared on live values
    USED = "used"
    REFUSED = "refused"


@dataclass(frozen=True)
class _Values:
    """One request's values."""

    crossing: Crossing
    header: bytes
    data: bytes

    def early(self) -> EarlyOutput:
        """Return a copy for one run."""
        limit = len(self.data) + self.crossing.payload_bytes
        return EarlyOutput.unpack(self.crossing, self.header, memoryview(bytearray(self.data)), limit, disposable=True)


@dataclass
class _Tail:
    name: str
    """The cut's name."""
    standing: Standing = Standing.COMPILING
    why: str = ""
    checked: int = 0
    compiled: dict[nn.Module, CompiledModule] = field(default_factory=dict)


class CompiledTails:
    """The compiled tails of ``wrapped``. Thread-safe.

    ``rounding``: whether last bits may differ, within `TOLERANCE`; else every comparison must be bit-identical, which
    proves nothing for other values.
    """

    def __init__(self, wrapped: WrappedModel, *, rounding: bool, backend: str = "inductor", wins: Wins = wins) -> None:
        """``backend``: torch.compile's. ``wins`` decides, from the seconds of a tail of the model's own and as
        compiled, whether the latter is worth using.
        """
        self._wins = wins
        self._wrapped = wrapped.beside()
        self._rounding = rounding
        self._backend = backend
        self._tails: dict[Key, _Tail] = {}
        self._jobs: queue.SimpleQueue[tuple[_Tail, _Values] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, early: EarlyOutput) -> None:
        """Compile the tail behind this head in the background, and compare it on these values."""
        parcel = early.pack("raw")
        values = _Values(early.crossing, parcel.header, b"".join(bytes(one) for one in parcel.buffers))
        tail = self._tails[_key(early.crossing)] = _Tail(early.layer_name)
        self._jobs.put((tail, values))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="isthmus-compiling", daemon=True)
            self._thread.start()

    def of(self, crossing: Crossing, header: bytes, payload: memoryview) -> Substitutes | None:
        """Return replacements of modules in this request's tail, or None for the model's own. May keep a copy to
        compare on.
        """
        tail = self._tails.get(_key(crossing)) if self._tails else None
        if tail is None or tail.standing is Standing.REFUSED:
            return None
        if tail.standing is Standing.USED:
            return tail.compiled.get
        fits = not crossing.books and payload.nbytes <= MAX_LIVE_BYTES
        if tail.standing is Standing.CHECKING and fits and self._jobs.empty():
            self._jobs.put((tail, _Values(crossing, header, bytes(payload))))
        return None

    def standings(self) -> dict[str, tuple[str, str]]:
        """Return the state of each tail, by its cut and the digest of its inputs' form, and why it is refused."""
        known = list(self._tails.items())
        return {f"{one.name} {signature[:8]}": (one.standing.value, one.why) for (_, signature), one in known}

    def give_up(self, why: str) -> None:
        """Disable all of them: the model has changed."""
        for tail in list(self._tails.values()):
            tail.standing, tail.why = Standing.REFUSED, why

    def close(self) -> None:
        """Stop compiling."""
        self._closed = True
        self.give_up("the model is closed")
        self._jobs.put(None)
        self._wrapped.detach()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closed:
            tail, values = job
            try:
                if tail.standing is Standing.COMPILING:
                    self._compile(tail, values)
                elif tail.standing is Standing.CHECKING:
                    self._check(tail, values)
            except Exception as error:  # of the compiler, or of the model
                self._refuse(tail, f"{type(error).__name__}: {error}"[:300])

    def _compile(self, tail: _Tail, values: _Values) -> None:
        if values.crossing.reads or values.crossing.generators:
            self._refuse(tail, "its path, or what it draws, is each request's own")
            return
        began, passed = time.monotonic(), set[nn.Module]()
        for _ in range(ROUNDS):
            finder = CompileFinder(passed)
            self._wrapped.tail(values.early(), substitutes=finder)
            fresh = [module for module in finder.found if module not in tail.compiled]
            if not fresh or self._closed:
                break
            for module in fresh[: MOST - len(tail.compiled)]:
                tail.compiled[module] = CompiledModule(module, self._backend)
            self._wrapped.tail(values.early(), substitutes=tail.compiled.get)
            for module in [module for module, one in tail.compiled.items() if one.why]:
                tail.why = tail.compiled.pop(module).why
                passed.add(module)
        if not tail.compiled:
            self._refuse(tail, tail.why or "no module behind the cut holds others: there is nothing to win")
            return
        for one in tail.compiled.values():
            one.built(graphs=devices.has_graphs(self._wrapped.device))
        if self._compared(tail, values) and tail.standing is Standing.COMPILING:
            tail.standing, tail.why = Standing.CHECKING, ""
            seconds = time.monotonic() - began
            log.info("after %s: %d modules compiled in %.1f s", tail.name, len(tail.compiled), seconds)

    def _check(self, tail: _Tail, values: _Values) -> None:
        if self._compared(tail, values):
            tail.checked += 1
            if tail.checked >= LIVE and tail.standing is Standing.CHECKING and self._is_worth_it(tail, values):
                tail.standing = Standing.USED
                log.info("after %s: the compiled tail is used from now on", tail.name)

    def _compared(self, tail: _Tail, values: _Values) -> bool:
        """Return whether both give the same result; else refuse the tail."""
        own: Any = self._wrapped.tail(values.early())
        other: Any = self._wrapped.tail(values.early(), substitutes=tail.compiled.get)
        broken = next((one.why for one in tail.compiled.values() if one.why), "")
        wrong = broken or difference(own, other, rounding=self._rounding)
        if wrong:
            self._refuse(tail, wrong)
        return not wrong

    def _is_worth_it(self, tail: _Tail, values: _Values) -> bool:
        """Time both in turns, and return whether it is worth using; else refuse the tail."""
        took: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(RUNS):
            for compiled, times in took.items():
                early = values.early()
                self._synchronize()
                began = time.perf_counter()
                self._wrapped.tail(early, substitutes=tail.compiled.get if compiled else None)
                self._synchronize()
                times.append(time.perf_counter() - began)
        own, other = statistics.median(took[False]), statistics.median(took[True])
        if not self._wins(own, other):
            self._refuse(tail, f"it is no faster: {1e3 * other:.2f} ms, and {1e3 * own:.2f} ms of the model's own")
            return False
        return True

    def _synchronize(self) -> None:
        devices.synchronize(self._wrapped.device)

    def _refuse(self, tail: _Tail, why: str) -> None:
        tail.standing, tail.why, tail.compiled = Standing.REFUSED, why, {}
        log.warning("after %s the tail is not compiled: %s", tail.name, why)


def _key(crossing: Crossing) -> Key:
    return crossing.name, crossing.signature
