"""Show forwards to observers, in a session or outside one.

The shim in a module's ``forward`` (`attach`) passes its calls to the `ModuleObservers` stored on it. An
`ObservedForward` is one forward under observation; a `Look` is one observer's part of it. Nothing is added to PyTorch's
own hook lists: the planner treats modules with hooks as foreign, and kernels may be chosen by them.

In a head, layers up to the cut are shown; in a tail, what ends after the cut. A module around the cut ends in the tail,
so every call is shown on exactly one side. Planning runs are not shown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
from torch import nn

from shared_hooks.errors import InputMismatch
from shared_hooks.forward import UNSEEN, Placeholder, Session
from shared_hooks.generation.remote_tensor import RemoteTensor
from shared_hooks.generation.tail import Tail
from shared_hooks.head import Banking, Diverged
from shared_hooks.modules import Runner, Shim, Shown, attach, call_name, running
from shared_hooks.tensors import is_namedtuple

# Numbers that stay on a device until the forward has ended, and are then read together, in one transfer.


@dataclass(frozen=True, eq=False)
class Deferred:
    """``values``: a flat tensor; ``make`` turns its copy on the CPU into a record, or None."""

    values: torch.Tensor
    make: Callable[[torch.Tensor], Any]


def read(waiting: Iterable[Deferred]) -> Callable[[Deferred], torch.Tensor]:
    """Copy all values to the CPU, in one transfer per device and dtype, and return the look-up.

    A tensor used several times is copied once.
    """
    moved: dict[int, torch.Tensor] = {}
    rows: dict[Any, dict[int, torch.Tensor]] = {}
    for one in waiting:
        values = one.values
        if values.device.type == "cpu":
            moved[id(values)] = values
        else:
            rows.setdefault((values.device, values.dtype), {})[id(values)] = values
    for row in rows.values():
        together = torch.cat(list(row.values())).cpu()
        moved.update(zip(row, together.split([len(values) for values in row.values()]), strict=True))
    return lambda one: moved[id(one.values)]


# Nested values as observers see them: the tensors inside with their places, copies, and sizes.


def is_real(value: Any) -> bool:
    """Return whether the value is a tensor on this side of the cut."""
    return isinstance(value, torch.Tensor) and type(value) not in (Placeholder, RemoteTensor)


def parts(value: Any, place: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) of every tensor on this side; ``""`` for a single tensor, else as "0.hidden"."""
    if is_real(value):
        yield place, value
        return
    seen = set() if seen is None else seen
    for key, item in _items(value, seen):
        yield from parts(item, f"{place}.{key}" if place else str(key), seen)


def _items(value: Any, seen: set[int]) -> list[tuple[Any, Any]]:
    if value is None or isinstance(value, (bool, int, float, str, bytes, type, torch.nn.Module, torch.Tensor)):
        return []
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    return list(vars(value).items()) if hasattr(value, "__dict__") else []


def copy_of(value: Any) -> Any:
    """Return a copy that may be changed and kept: cloned tensors, None for placeholders, a dictionary of parts
    for unknown holders.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if is_real(value) else None
    return _copy_of_holder(value)


def _copy_of_holder(value: Any) -> Any:
    kind: Any = type(value)
    if is_namedtuple(value):
        items = [copy_of(item) for item in value]
        return tuple.__new__(kind, items) if hasattr(kind, "_fields") else kind(items)
    if isinstance(value, dict) and hasattr(kind, "__dataclass_fields__"):  # ModelOutput
        return kind(**{key: copy_of(item) for key, item in value.items()})
    if kind in (list, tuple):
        return kind(copy_of(item) for item in value)
    if kind is dict:
        return {key: copy_of(item) for key, item in value.items()}
    found = {place: copy_of(tensor) for place, tensor in parts(value)}
    return found or value


_PLAIN = frozenset({int, float, bool, type(None)})


def size_of(value: Any, depth: int = 0) -> int:
    """Return the approximate bytes of a kept value: exact for tensors and arrays, Python's size for the rest."""
    if type(value) in _PLAIN:
        return 32
    if isinstance(value, torch.Tensor):
        if not is_real(value):
            return 0
        has_storage = value.layout is torch.strided and not value.is_nested
        return value.untyped_storage().nbytes() if has_storage else value.numel() * value.element_size()
    nbytes = getattr(value, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes
    own = sys.getsizeof(value, 64)
    if depth >= 8:
        return own
    if type(value) is str:
        return own
    if isinstance(value, (list, tuple, set, frozenset)):
        if all(type(item) in _PLAIN for item in value):
            return own + 32 * len(value)
        return own + sum(size_of(item, depth + 1) for item in value)
    if isinstance(value, Mapping):
        return own + sum(size_of(item, depth + 1) for item in value.values())
    if hasattr(value, "__dict__"):
        return own + sum(size_of(item, depth + 1) for item in vars(value).values())
    return own


class ObservedCall:
    """One call of one module. ``args``, ``kwargs`` and ``output`` are the live values and must not be changed.

    ``is_real()``: whether the running code is on this side of the cut, and not a replay. ``began``: whether it was so
    when the call began; if not, its arguments may be placeholders. ``grad``: whether the model runs with gradients.
    ``memo``: results that observers share, by key.
    """

    __slots__ = ("args", "began", "grad", "is_real", "kwargs", "memo", "module", "number", "output")

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], is_real: Callable[[], bool]
    ) -> None:
        self.module = module
        self.args = args
        self.kwargs = kwargs
        self.is_real = is_real
        self.began = is_real()
        self.grad = torch.is_grad_enabled()
        self.number = 1
        self.output: Any = None
        self.memo: dict[Any, Any] = {}


class Look(Protocol):
    """One observer in one forward. Its methods raise only what an observer raises on purpose."""

    changes: bool
    """Whether `after` may replace the call's output."""
    surrounds: bool

    def before(self, call: ObservedCall, name: str) -> AbstractContextManager[Any] | None:
        """Called before the module runs, if `surrounds`; returns a context to enter around it."""

    def after(self, call: ObservedCall, name: str) -> None:
        """Called after the module has run."""

    def deferred(self) -> list[Deferred]:
        """Return what is to be read from the device."""

    def end(self, read: Callable[[Deferred], torch.Tensor]) -> None:
        """Called at the end of the forward, however it ended."""

    def forget(self) -> None:
        """Discard the forward: a head left the path of its plan, and another plan is tried."""


class Watcher(Protocol):
    """One attachment: modules under ``root`` with their names, and the sessions it covers (None: all)."""

    root: nn.Module
    modules: Mapping[nn.Module, str]
    owner: object

    def begin(self, whole: bool) -> Look | None:
        """Begin a forward of the root (``whole``) or of a part of it alone; return None to skip it."""


class ObservedForward:
    """One observed forward; ``session`` runs it, None outside Isthmus."""

    def __init__(self, session: Session | Shown | None) -> None:
        self.session = session
        self.looks: dict[Watcher, Look | None] = {}
        self.all: list[Look] = []
        self.counts: dict[nn.Module, int] = {}
        self.idle = False
        """Whether no observer watches this forward, so that inner modules need not check again."""

    def looks_at(self, module: nn.Module, here: tuple[Watcher, ...]) -> list[tuple[Look, str]]:
        found = []
        for watcher in here:
            whole = watcher.root is module
            if whole or watcher not in self.looks:
                mine = watcher.owner is None or self.session is None or watcher.owner is self.session.modules
                look = self.looks[watcher] = watcher.begin(whole) if mine else None
                if look is not None:
                    self.all.append(look)
            else:
                look = self.looks[watcher]
            if look is not None and module in watcher.modules:
                found.append((look, watcher.modules[module]))
        complete = len(self.looks) == len(attach.watchers)
        # a part with observers of its own checks them at each of its calls
        self.idle = complete and not self.all and all(watcher.root is module for watcher in self.looks)
        return found

    def show(self, looks: list[tuple[Look, str]], module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run the module, and show the call if its result is real on this side."""
        call = ObservedCall(module, args, kwargs, self._is_real)
        if any(look.surrounds for look, _ in looks):
            with ExitStack() as around:
                for look, name in looks:
                    context = look.before(call, name) if look.surrounds else None
                    if context is not None:
                        around.enter_context(context)
                output = forward(*args, **kwargs)
        else:
            output = forward(*args, **kwargs)
        if not self._is_real():
            return output
        call.output = output
        call.number = self._number(module)
        # our own reads of tensors are not operations of the model, and are outside of the session
        token = running.set(UNSEEN)
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                for look, name in looks:
                    look.after(call, call_name(name, call.number))
                    if look.changes:
                        output = call.output
                    else:
                        call.output = output
        finally:
            running.reset(token)
        return output

    def _is_real(self) -> bool:
        session = self.session
        return bool(getattr(session, "is_real", getattr(session, "resumed", True)))

    def _number(self, module: nn.Module) -> int:
        session = self.session
        info = session.modules.get(module) if isinstance(session, Session) else None
        if isinstance(session, Session) and info is not None and session.stack:
            # a module around the cut has its number from the head
            return session.stack[-1][1] or session.counts.get(info.path, 1)
        number = self.counts[module] = self.counts.get(module, 0) + 1
        return number

    def forget(self) -> None:
        """Discard the forward."""
        for look in self.all:
            look.forget()

    def end(self) -> None:
        """Read everything that waits on a device, in one transfer, and let the looks make their records."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            found = read([one for look in self.all for one in look.deferred()])
            error: Exception | None = None
            for look in self.all:
                try:
                    look.end(found)
                except Exception as raised:  # on purpose; the other observers are still called
                    error = error or raised
        if error is not None:
            raise error


_current: ContextVar[ObservedForward | None] = ContextVar("isthmus_observed", default=None)


class ModuleObservers:
    """A shim's observers: those of its module, and those whose root it is."""

    def __init__(self) -> None:
        self.watchers: tuple[Watcher, ...] = ()
        self.users = 0

    def call(self, shim: Shim, session: Runner | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module, forward = shim.module, shim.gate or shim.forward
        if session is not None and not _is_shown(session):
            return session.call(module, forward, args, kwargs)  # planning
        observed = _current.get()
        if observed is not None and observed.session is session:
            if observed.idle:
                return forward(*args, **kwargs) if session is None else session.call(module, forward, args, kwargs)
            return self._shown(observed, module, forward, args, kwargs)
        observed = ObservedForward(session)
        token = _current.set(observed)
        counts = True
        try:
            output = self._shown(observed, module, forward, args, kwargs)
            # a head that runs to the model's end missed its cut
            counts = not isinstance(session, Banking)
            return output
        except BaseException as error:
            # a failed step is repeated
            counts = not isinstance(error, Diverged) and not isinstance(session, Tail)
            raise
        finally:
            _current.reset(token)
            if not counts:
                observed.forget()
            elif observed.all:
                observed.end()

    def _shown(self, observed: ObservedForward, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        looks = observed.looks_at(module, self.watchers) if self.watchers else None
        session = observed.session
        if not looks:
            return forward(*args, **kwargs) if session is None else session.call(module, forward, args, kwargs)
        if session is None:
            return observed.show(looks, module, forward, args, kwargs)

        def shown(*args: Any, **kwargs: Any) -> Any:
            return observed.show(looks, module, forward, args, kwargs)

        return session.call(module, shown, args, kwargs)


def _is_shown(session: Runner) -> TypeGuard[Session | Shown]:
    """Return whether it is a session or a step of a generation, rather than planning."""
    return isinstance(session, Session) or getattr(session, "is_shown", False)


def _touched(watcher: Watcher) -> list[nn.Module]:
    """Return the root, the observed modules, and those between them, so that a part called alone is one forward."""
    paths = dict(watcher.root.named_modules(remove_duplicate=False))
    found: dict[nn.Module, None] = {watcher.root: None}
    for path, module in paths.items():
        if module in watcher.modules:
            parts = path.split(".")
            found.update(dict.fromkeys(paths[".".join(parts[: end + 1])] for end in range(len(parts)) if path))
    return list(found)


def register(watcher: Watcher) -> list[Shim]:
    """Show ``watcher`` the forwards of its modules from now on; return the argument for `unregister`."""
    shims = []
    with attach.lock:
        attach.watchers.add(watcher)
        for module in _touched(watcher):
            shim = attach.attach(module)
            shims.append(shim)
            here = shim.watching
            if not isinstance(here, ModuleObservers):
                here = shim.watching = ModuleObservers()
            here.users += 1
            if module is watcher.root or module in watcher.modules:
                here.watchers = (*here.watchers, watcher)
    return shims


def unregister(watcher: Watcher, shims: list[Shim]) -> None:
    """Undo `register`; the last one also removes the shim."""
    with attach.lock:
        attach.watchers.discard(watcher)
        for shim in shims:
            here = shim.watching
            if isinstance(here, ModuleObservers):
                here.users -= 1
                here.watchers = tuple(other for other in here.watchers if other is not watcher)
                if here.users == 0:
                    shim.watching = None
            attach.detach(shim.module)


# PyTorch's full backward hooks on modules, a separate one for each call of a module.
#
# A hook gets the module and gradients, not the call they belong to. So there is always a fresh one on the module: a
# call takes it along, and a new one is put in its place.


Gradients = tuple[torch.Tensor | None, ...]


class Pass:
    """One call of a module and its backward pass, reported only if the call was observed."""

    __slots__ = ("name", "on_gradients", "one_input", "one_output", "step")

    def __init__(self) -> None:
        self.name, self.step = "", 0
        self.one_input = self.one_output = False
        self.on_gradients: Callable[[Pass, Gradients, Gradients], None] | None = None

    def __call__(self, module: nn.Module, by_input: Any, by_output: Any) -> None:
        if self.on_gradients is not None:
            self.on_gradients(self, _tuple(by_input), _tuple(by_output))


class BackwardHooks:
    """Backward hooks on ``modules`` until `remove`. ``on_gradients`` gets the gradients of observed calls.

    For models that run in one thread at a time. Raises InputMismatch for a module that does not support such hooks.
    """

    def __init__(
        self, modules: Iterable[nn.Module], on_gradients: Callable[[Pass, Gradients, Gradients], None]
    ) -> None:
        self._report = on_gradients
        self._next: dict[nn.Module, tuple[Pass, Any]] = {}
        self._begun: dict[nn.Module, Pass] = {}
        self._before: dict[nn.Module, Any] = {}
        self._handles: list[Any] = []
        self._on = True
        try:
            for module in modules:
                self._before[module] = module._is_full_backward_hook
                self._arm(module)
                self._handles.append(module.register_forward_pre_hook(self._begin))
        except RuntimeError as error:  # there are hooks of the old kind, or a scripted module
            self.remove()
            raise InputMismatch(f"{type(module).__name__} does not accept a full backward hook: {error}") from error

    def looked_at(self, module: nn.Module, name: str, step: int, one_input: bool, one_output: bool) -> bool:
        """Return whether a hook covers the running call of ``module``, which gets this name; not so for a direct
        ``forward``.
        """
        found = self._begun.pop(module, None)
        if found is None:
            return False
        found.name, found.step, found.one_input, found.one_output = name, step, one_input, one_output
        found.on_gradients = self._on_gradients
        return True

    def remove(self) -> None:
        """Remove all hooks; pending backward passes are not reported."""
        self._on = False
        for handle in (*self._handles, *(handle for _, handle in self._next.values())):
            handle.remove()
        for module, before in self._before.items():
            if not module._backward_hooks:
                module._is_full_backward_hook = before
        self._handles, self._next, self._begun = [], {}, {}

    def _arm(self, module: nn.Module) -> None:
        fresh = Pass()
        self._next[module] = fresh, module.register_full_backward_hook(fresh)

    def _begin(self, module: nn.Module, args: Any) -> None:
        taken, handle = self._next[module]
        handle.remove()
        self._arm(module)
        self._begun[module] = taken

    def _on_gradients(self, found: Pass, by_input: Gradients, by_output: Gradients) -> None:
        if self._on:
            self._report(found, by_input, by_output)


def _tuple(found: Any) -> Gradients:
    return found if isinstance(found, tuple) else (found,)
