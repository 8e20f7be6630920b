"""How a forward is shown to observers, in a session or outside one.

The shim that stands in a module's ``forward`` (`attach`) hands its calls to the `ModuleObservers` that is left on it.
An `ObservedForward` is one forward that is looked at; a `Look` is one observer's part of it. Nothing is left in
PyTorch's own hook lists: the planner takes modules with hooks for foreign, and kernels may be chosen by them.

In a head, layers up to the cut are shown; in a tail, what ends after the cut. A module around the cut ends in the tail,
so every call is shown on exactly one side. Planning is shown to nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from typing import Any, Protocol, TypeGuard

import torch
from torch import nn

from shared_hooks.forward import UNSEEN, Session
from shared_hooks.generation.tail import Tail
from shared_hooks.head import Banking, Diverged
from shared_hooks.modules import Runner, Shim, Shown, attach, call_name, running
from shared_hooks.observers.deferred import Deferred, read


class ObservedCall:
    """One call of one module. ``args``, ``kwargs`` and ``output`` are the live values, not to be changed.

    ``is_real()``: whether what runs now runs on this side of the cut, and is no replay. ``began``: whether the call did
    so when it began; if not, its arguments may be placeholders. ``grad``: whether the model runs with gradients.
    ``memo``: what one observer computed and another may use, by key.
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
    """One observer in one forward. Nothing here raises, but for what an observer raises on purpose."""

    changes: bool
    """Whether `after` may put another output into the call."""
    surrounds: bool

    def before(self, call: ObservedCall, name: str) -> AbstractContextManager[Any] | None:
        """The module is about to run; what is returned is entered around it. Only called if `surrounds`."""

    def after(self, call: ObservedCall, name: str) -> None:
        """The module has run."""

    def deferred(self) -> list[Deferred]:
        """What waits to be read from the device."""

    def end(self, read: Callable[[Deferred], torch.Tensor]) -> None:
        """The forward is over, however it ended."""

    def forget(self) -> None:
        """It did not count: a head left the path of its plan, and another plan is tried."""


class Watcher(Protocol):
    """One attachment: which modules under ``root``, by which names, and for whose sessions (None: for all)."""

    root: nn.Module
    modules: Mapping[nn.Module, str]
    owner: object

    def begin(self, whole: bool) -> Look | None:
        """A forward begins, of the root (``whole``) or of a part of it alone; None: not this one."""


class ObservedForward:
    """One forward that is looked at; ``session`` is what runs it, None outside Isthmus."""

    def __init__(self, session: Session | Shown | None) -> None:
        self.session = session
        self.looks: dict[Watcher, Look | None] = {}
        self.all: list[Look] = []
        self.counts: dict[nn.Module, int] = {}
        self.idle = False
        """Everybody was asked and nobody looks at this forward: the modules inside need not ask again."""

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
        everybody = len(self.looks) == len(attach.watchers)
        # a part with observers of its own asks them at each of its calls
        self.idle = everybody and not self.all and all(watcher.root is module for watcher in self.looks)
        return found

    def show(self, looks: list[tuple[Look, str]], module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run the module, and show it if what it gives is real on this side."""
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
        # our own look at tensors is no operation of the model's, and nothing of it belongs to the session
        token = running.set(UNSEEN)
        try:
            with torch._C.DisableTorchFunction(), torch.no_grad():
                for look, name in looks:
                    look.after(call, name if call.number == 1 else call_name(name, call.number))
                    if look.changes:
                        output = call.output
                    else:
                        call.output = output
        finally:
            running.reset(token)
        return output

    def _is_real(self) -> bool:
        return bool(getattr(self.session, "resumed", True))

    def _number(self, module: nn.Module) -> int:
        session = self.session
        info = session.modules.get(module) if isinstance(session, Session) else None
        if isinstance(session, Session) and info is not None and session.stack:
            # a module around the cut has its number from the head
            return session.stack[-1].number or session.counts.get(info.path, 1)
        number = self.counts[module] = self.counts.get(module, 0) + 1
        return number

    def forget(self) -> None:
        """As if it had not been."""
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
                except Exception as raised:  # on purpose; the others still get theirs
                    error = error or raised
        if error is not None:
            raise error


_current: ContextVar[ObservedForward | None] = ContextVar("isthmus_observed", default=None)


class ModuleObservers:
    """What a shim knows of observers: those that look at its module, or have it as their root."""

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
            # a step that fails is asked for again
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
    """A session, or a step of a generation; planning is neither."""
    return isinstance(session, Session) or getattr(session, "is_shown", False)


def _touched(watcher: Watcher) -> list[nn.Module]:
    """The root, the modules looked at, and what lies between: so that a part that is called alone is one forward."""
    paths = dict(watcher.root.named_modules(remove_duplicate=False))
    found: dict[nn.Module, None] = {watcher.root: None}
    for path, module in paths.items():
        if module in watcher.modules:
            parts = path.split(".")
            found.update(dict.fromkeys(paths[".".join(parts[: end + 1])] for end in range(len(parts)) if path))
    return list(found)


def register(watcher: Watcher) -> list[Shim]:
    """From now on ``watcher`` is shown the forwards of its modules; returns what `unregister` wants."""
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
    """Take away what `register` put there; the last one takes the shim along."""
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
