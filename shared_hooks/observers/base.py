"""Define `Observer`: looks at modules while a model runs, without changing or breaking it.

    with ActivationStats("layer1.*", every_n=10).attach(model_or_wrapped) as stats:
        model_or_wrapped(x)
    stats.records

An observer never changes a value. An exception is reported once and counted, and the forward continues. Its records are
bounded by number and bytes, and the oldest are dropped first. Its cost is measured. Leaving the block removes exactly
what was attached.
"""

from __future__ import annotations

import fnmatch
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, TypeAlias

import torch
from torch import nn

from shared_hooks.errors import InputMismatch, IsthmusError, UnknownLayer, near, near_path
from shared_hooks.modules import ROOT, tables, walk
from shared_hooks.observers import watching
from shared_hooks.observers.watching import Deferred, ObservedCall, size_of
from shared_hooks.wrapped import WrappedModel

# The modules that an observer watches: names, globs, regular expressions, types, groups, modules themselves.

Target: TypeAlias = "str | re.Pattern[str] | type[nn.Module] | nn.Module"
Targets: TypeAlias = "Target | Iterable[Target]"


def resolve(model: nn.Module, targets: Targets) -> dict[nn.Module, str]:
    """Return the modules of ``model`` that match, with their names, in definition order.

    A target is a module's name (``"(model)"`` or ``""`` is the model itself), a glob (``*`` crosses dots), a regular
    expression (``re.compile(...)`` or ``"re:..."``, searched in the name), a type, the name of a type as
    ``"type:Conv2d"``, a group as ``"group:vision"`` (see `modules.tables`), or a module. Raises UnknownLayer for a
    target without a match, with similar names.
    """
    # a scripted or compiled module runs unobserved: none of its submodules
    infos = walk(model, None)
    names = {info.path: module for module, info in infos.items()}
    for name, module in model.named_modules(remove_duplicate=False):
        if module in infos:
            names.setdefault(name or ROOT, module)
    found: set[nn.Module] = set()
    several = isinstance(targets, Iterable) and not isinstance(targets, (str, bytes, type, nn.Module))
    wanted: list[Any] = list(targets) if several else [targets]  # type: ignore[arg-type]
    if not wanted:
        raise UnknownLayer("no target was given; None stands for the observer's default")
    for target in wanted:
        matching = _matching(model, names, target)
        if not matching:
            raise UnknownLayer(_nothing(target, names))
        found.update(matching)
    return {module: info.path for module, info in infos.items() if module in found}


def _matching(model: nn.Module, names: dict[str, nn.Module], target: Any) -> list[nn.Module]:
    if isinstance(target, nn.Module):
        return [module for module in names.values() if module is target]
    if isinstance(target, type):
        return [module for module in names.values() if isinstance(module, target)]
    if isinstance(target, re.Pattern):
        return [module for name, module in names.items() if target.search(name)]
    if not isinstance(target, str):
        raise UnknownLayer(f"a target is a name, a pattern, a type or a module, not {type(target).__name__}")
    if target in names or target == "":
        return [names[target or ROOT]]
    kind, _, rest = target.partition(":")
    if kind == "re":
        try:
            return _matching(model, names, re.compile(rest))
        except re.error as error:
            raise UnknownLayer(f"{target!r} is not a regular expression: {error}") from error
    if kind == "type":
        return [module for module in names.values() if any(base.__name__ == rest for base in type(module).__mro__[:-1])]
    if kind == "group":
        inside = tables.groups_of(model).get(rest, ())
        return [names[name] for name in inside if name in names]
    return [module for name, module in names.items() if fnmatch.fnmatchcase(name, target)]


def _nothing(target: Any, names: dict[str, nn.Module]) -> str:
    if isinstance(target, nn.Module):
        return f"the module of type {type(target).__name__} is not part of the model"
    if isinstance(target, type) or (isinstance(target, str) and target.startswith("type:")):
        wanted = target.__name__ if isinstance(target, type) else target[5:]
        known = sorted({type(module).__name__ for module in names.values()})
        return f"no module is a {wanted}.{near(wanted, known) or _some(known)}"
    if isinstance(target, str) and target.startswith("group:"):
        groups = list(tables.GROUPS)
        return f"no module is in the group {target[6:]!r}.{near(target[6:], groups) or _some(groups)}"
    text = target.pattern if isinstance(target, re.Pattern) else target
    plain = re.sub(r"^re:|[\\*?^$()\[\]+|]", "", text)
    return f"no module is called {text!r}.{near_path(plain, names) or _some(list(names))}"


def _some(names: list[str]) -> str:
    more = ", ..." if len(names) > 8 else ""
    return f" There are {', '.join(names[:8])}{more}."


def _is_leaf(module: nn.Module) -> bool:
    # quantised modules of torch keep their weights in children that are never called
    return next(module.children(), None) is None or type(module).__module__.startswith("torch.ao.nn")


def leaves(model: nn.Module) -> dict[nn.Module, str]:
    """Return the default targets: modules without children, and attention modules as a whole."""
    found: dict[nn.Module, str] = {}
    inside: set[nn.Module] = set()
    for module, info in walk(model, None).items():
        if isinstance(module, nn.MultiheadAttention):
            inside.update(list(module.modules())[1:])
            found[module] = info.path
        elif module not in inside and (info.opaque or _is_leaf(module)):
            found[module] = info.path
    return found


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """Base of all records.

    ``name``: the module's path, with ``#n`` from its second call in one forward on. ``step``: the number of the forward
    since the observer was attached, from 0; during generation, the step.
    """

    name: str
    step: int


class Observer:
    """Base of all observers: a subclass implements `observe`.

    ``targets``: see `resolve`; None: `default_targets`. ``every_n``: observe every n-th forward of the model, including
    the first. ``max_records``, ``max_bytes``: bounds of the records. Several forwards, threads and models may be
    observed at once.
    """

    surrounds: ClassVar[bool] = False
    """Whether to call `around`."""
    changes: ClassVar[bool] = False
    """Only transforms change values."""

    def __init__(
        self,
        targets: Targets | None = None,
        every_n: int = 1,
        max_records: int = 1000,
        max_bytes: int = 64 * 2**20,
    ) -> None:
        for name, number in (("every_n", every_n), ("max_records", max_records), ("max_bytes", max_bytes)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise InputMismatch(f"{name} is a number from 1 up, not {number!r}")
        self.targets = targets
        self.every_n = every_n
        self.max_records = max_records
        self.max_bytes = max_bytes
        self.dropped = 0
        """Number of records dropped."""
        self.failures = 0
        self.last_failure = ""
        self.notes: tuple[str, ...] = ()
        """Deviations from what was requested, and what cannot be observed."""
        self.cost_ns = 0
        """Total time spent in this observer."""
        self.calls = 0
        """Number of observed module calls."""
        self._kept: deque[tuple[Any, int]] = deque()
        self._bytes = 0
        self._lock = threading.Lock()

    # -- for subclasses -----------------------------------------------------------------------------------------

    def default_targets(self, model: nn.Module) -> dict[nn.Module, str]:
        """Return module -> name if no targets are given; here the leaves."""
        return leaves(model)

    def around(
        self, call: ObservedCall, name: str, step: int, add: Callable[[Any], None]
    ) -> AbstractContextManager[Any] | None:
        """Return a context for the module's forward, if `surrounds`. ``add`` takes what `observe` may return, for
        values seen inside a module that a cut leaves before its end.
        """
        return None

    def observe(self, call: ObservedCall, name: str, step: int) -> Any:
        """Observe a finished call; return a record, a `Deferred` that makes one, a list of these, or None.

        Runs under ``no_grad``; ``call`` holds the live values, which must not be changed.
        """
        raise NotImplementedError

    def forward_done(self, records: list[Any], step: int) -> None:
        """Called after a forward whose records are kept. Raising an error of Isthmus ends the request."""

    def detached(self, root: nn.Module) -> None:
        """Called when an attachment has ended."""

    # -- use ----------------------------------------------------------------------------------------------------

    @property
    def records(self) -> list[Any]:
        """The records kept, oldest first."""
        with self._lock:
            return [record for record, _ in self._kept]

    @property
    def cost_per_call_ns(self) -> float:
        """Mean cost of an observed module call."""
        return self.cost_ns / self.calls if self.calls else 0.0

    def clear(self) -> None:
        """Delete the records."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0

    def attach(self, model: nn.Module | WrappedModel, *, this_thread: bool = False) -> Attachment:
        """Observe until the block is left, or `Attachment.detach` is called.

        For a `WrappedModel`: its heads, tails and whole forwards, and its model running by itself. For a module: all
        its runs. ``this_thread``: only forwards of the calling thread. Raises UnknownLayer for a target without a
        match.
        """
        wrapped = model if isinstance(model, WrappedModel) else None
        root = model if wrapped is None else wrapped.model
        if not isinstance(root, nn.Module):
            raise InputMismatch(f"attach takes a torch.nn.Module or a WrappedModel, not {type(model).__name__}")
        modules = self.default_targets(root) if self.targets is None else resolve(root, self.targets)
        owner = None if wrapped is None else wrapped.modules
        return self._attachment(root, modules, owner, threading.get_ident() if this_thread else None)

    def _attachment(self, root: nn.Module, modules: dict[nn.Module, str], owner: Any, thread: int | None) -> Attachment:
        return Attachment(self, root, modules, owner, thread)

    # -- isolation ----------------------------------------------------------------------------------------------

    def failed(self, error: Exception, where: str) -> None:
        """Count a failure; the first is logged."""
        with self._lock:
            self.failures += 1
            first = self.failures == 1
            self.last_failure = f"{where}: {type(error).__name__}: {error}"[:500]
        if first:
            log.warning(
                "observer %s failed at %s; the forward continues, further failures are only counted",
                type(self).__name__,
                self.last_failure,
            )

    def keep(self, records: list[Any]) -> None:
        """Add records, dropping the oldest beyond the bounds."""
        sized = [(record, size_of(record)) for record in records[-self.max_records :]]
        with self._lock:
            self.dropped += len(records) - len(sized)
            for record, size in sized:
                self._kept.append((record, size))
                self._bytes += size
            while self._kept and (len(self._kept) > self.max_records or self._bytes > self.max_bytes):
                self._bytes -= self._kept.popleft()[1]
                self.dropped += 1

    def spent(self, since_ns: int, calls: int = 0) -> None:
        """Add the time since ``since_ns`` to the cost."""
        spent_ns = time.perf_counter_ns() - since_ns
        with self._lock:
            self.cost_ns += spent_ns
            self.calls += calls


class Attachment:
    """An observer attached to a model; ends with the block or by `detach`."""

    def __init__(
        self, observer: Observer, root: nn.Module, modules: Mapping[nn.Module, str], owner: object, thread: int | None
    ) -> None:
        self.observer = observer
        self.root = root
        self.modules = modules
        self.owner = owner
        self.thread = thread
        self._next = 0
        self._lock = threading.Lock()
        self._shims: list[Any] | None = watching.register(self)

    @property
    def is_attached(self) -> bool:
        """Whether it is attached."""
        return self._shims is not None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the observed modules."""
        return tuple(self.modules.values())

    def begin(self, whole: bool) -> ObserverLook | None:
        """Begin a forward; see `watching.Watcher`."""
        if self.thread is not None and self.thread != threading.get_ident():
            return None
        with self._lock:
            step = self._next
            if whole:
                self._next = step + 1
        return None if step % self.observer.every_n else ObserverLook(self, step)

    def forget(self, step: int) -> None:
        """Discard this step's forward: the next one gets its number."""
        with self._lock:
            if self._next == step + 1:
                self._next = step

    def detach(self) -> None:
        """Detach. A second call has no effect."""
        shims, self._shims = self._shims, None
        if shims is not None:
            watching.unregister(self, shims)
            self.observer.detached(self.root)

    def __enter__(self) -> Any:
        return self.observer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()


class ObserverLook:
    """One observer in one forward; see `watching.Look`."""

    def __init__(self, attachment: Attachment, step: int) -> None:
        self.attachment = attachment
        self.observer = observer = attachment.observer
        self.step = step
        self.surrounds = observer.surrounds
        self.changes = observer.changes
        self.results: list[Any] = []

    def before(self, call: ObservedCall, name: str) -> AbstractContextManager[Any] | None:
        started = time.perf_counter_ns()
        try:
            return self.observer.around(call, name, self.step, self.add)
        except Exception as error:
            self.observer.failed(error, name)
            return None
        finally:
            self.observer.spent(started)

    def after(self, call: ObservedCall, name: str) -> None:
        started = time.perf_counter_ns()
        try:
            self.add(self.observer.observe(call, name, self.step))
        except Exception as error:
            self.observer.failed(error, name)
        finally:
            self.observer.spent(started, 1)

    def add(self, found: Any) -> None:
        """Collect what `Observer.observe` returns until the forward is over."""
        if isinstance(found, list):
            self.results += found
        elif found is not None:
            self.results.append(found)

    def forget(self) -> None:
        self.results = []
        self.attachment.forget(self.step)

    def deferred(self) -> list[Deferred]:
        return [one for one in self.results if isinstance(one, Deferred)]

    def end(self, read: Callable[[Deferred], torch.Tensor]) -> None:
        started = time.perf_counter_ns()
        observer = self.observer
        try:
            records: list[Any] = []
            results, self.results = self.results, []
            for one in results:
                made = one.make(read(one)) if isinstance(one, Deferred) else one
                records += made if isinstance(made, list) else [] if made is None else [made]
            observer.keep(records)
            observer.forward_done(records, self.step)
        except IsthmusError:
            raise
        except Exception as error:
            observer.failed(error, f"the end of step {self.step}")
        finally:
            observer.spent(started)
