"""Puts a shim before a module's ``forward``, and removes exactly that.

A pre-hook can replace a module's inputs but cannot skip its forward, and hooks do not see direct ``.forward()`` calls;
so Isthmus uses the instance's ``forward`` attribute, where ``Module.__call__`` and direct calls both look. The shim is
shared by all `WrappedModel`s of one module and finds the running session through a context variable: installed once,
thread-safe, and nearly free for runs of the model outside a session (one lookup).

A module that is compiled in place (`Module.compile`) is called without its ``forward``: there the shim precedes the
compiled code. While torch.compile reads a module the shim is hidden, so that the compiled code is unchanged.
"""

from __future__ import annotations

import copy
import functools
import threading
import types
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import nn

# Keeps PyTorch's MultiheadAttention fast path off while Isthmus runs a model.
#
# The fast path fuses a whole encoder layer into one kernel and so skips the modules inside; with another kernel the
# last bits differ. The switch is global to the process, so it is counted: off while any forward of ours runs, in any
# thread, and restored afterwards.


_lock = threading.Lock()
_running = 0
_before = True


class fast_path_off:  # used as a function
    """Disables torch's fast path for the duration; nests, and counts over threads."""

    def __enter__(self) -> None:
        global _running, _before
        with _lock:
            if _running == 0:
                _before = torch.backends.mha.get_fastpath_enabled()
                if _before:
                    torch.backends.mha.set_fastpath_enabled(False)
            _running += 1

    def __exit__(self, *_: object) -> None:
        global _running
        with _lock:
            _running -= 1
            if _running == 0 and _before:
                torch.backends.mha.set_fastpath_enabled(True)


# Temporary replacements for methods of one module.


class Replacement:
    """A function on a module that replaces a method. Checks of what a model keeps between calls ignore it and what is
    behind it.
    """

    def __init__(self, function: Callable[..., Any], before: Any) -> None:
        self._function = function
        self.before = before
        """What was there, or None."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def put_replacement(module: nn.Module, functions: dict[str, Callable[..., Any]]) -> Callable[[], None]:
    """Put functions there under the methods' names. Returns a function that removes them, except where others have
    replaced them since.
    """
    own = vars(module)
    before = {name: own[name] for name in functions if name in own}
    ours = {name: Replacement(function, own.get(name)) for name, function in functions.items()}
    own.update(ours)

    def take_off() -> None:
        for name, one in ours.items():
            if own.get(name) is one:
                del own[name]
                own.update({name: before[name]} if name in before else {})

    return take_off


_ABSENT = object()
COMPILED = "_compiled_call_impl"  # set by `Module.compile`
lock = threading.RLock()
"""Held during every change of shims, and of what observers leave on them."""


class Runner(Protocol):
    """What a running session gives a shim: it decides how the module's forward runs."""

    is_bare: bool
    """From now on modules run as if there were no session: `call` is not used."""

    def call(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...

    def failed(self, error: BaseException) -> None:
        """Record an error that must not be lost, even if the model's own code catches the exception."""


class Shown(Runner, Protocol):
    """A runner whose calls observers see, though it is no `Session`. ``modules``: of the model that it runs."""

    modules: object
    is_shown: bool


class Watching(Protocol):
    """What observers leave on a shim: they see the module's call, in a session or outside one."""

    def call(self, shim: Shim, session: Runner | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


running: ContextVar[Runner | None] = ContextVar("isthmus_session", default=None)
watchers: set[Any] = set()
"""The observers attached to any model; changed under `lock`."""


def is_of_class(module: nn.Module, forward: Any) -> bool:
    """Return whether a module's "forward" is what its class defines; so it is for copies of modules with shims."""
    is_own = type(forward) is types.MethodType and forward.__self__ is module
    return is_own and forward.__func__ is type(module).forward


class Shim:
    """The callable in ``module.__dict__[slot]``: "forward", or `COMPILED`."""

    def __init__(self, module: nn.Module, slot: str) -> None:
        self.module = module
        self.users = 0
        self.watching: Watching | None = None
        self.gate: Callable[..., Any] | None = None
        """Replaces ``forward`` below sessions and observers (`shared_hooks.generation.together`)."""
        self.entry: Callable[..., Any] | None = None
        """Handles calls outside sessions (`shared_hooks.generation.split`)."""
        self.before = module.__dict__.get(slot, _ABSENT)
        if is_of_class(module, self.before):
            self.before = _ABSENT
        self.forward: Callable[..., Any] = getattr(module, slot)
        self._class = type(module) if slot == "forward" and self.before is _ABSENT else None
        """The class whose method `forward` is; None if it is the module's own."""
        # transformers reads inspect.signature(model.forward); __wrapped__ keeps it the model's own
        functools.update_wrapper(self, self.forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self.forward(*args, **kwargs)
        if self._class is not None and type(self.module) is not self._class:  # the model's code has changed it
            self._class = type(self.module)
            self.forward = types.MethodType(self._class.forward, self.module)
        session = running.get()
        if session is None and self.entry is not None:
            return self.entry(*args, **kwargs)
        watching = self.watching
        if watching is not None:
            return watching.call(self, session, args, kwargs)
        forward = self.gate or self.forward
        if session is None or session.is_bare:
            return forward(*args, **kwargs)
        return session.call(self.module, forward, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # a copy of the module must run its own weights, not ours
        if self.before is not _ABSENT:
            return copy.deepcopy(self.before, memo)
        twin = memo.get(id(self.module))
        return self.forward if twin is None else types.MethodType(type(twin).forward, twin)

    def __reduce__(self) -> Any:
        # a method of the copy, in a form that pickle supports
        return functools.partial, (type(self.module).forward, self.module)


_LOOK_ONLY = ("shared_hooks.", "transformers.utils.output_capturing")
"""Hooks that only observe, and that each side adds itself."""


def hooks_of(module: nn.Module) -> list[str]:
    """Return the names of a module's forward hooks, except for those that each side adds itself."""
    return [name for name, _ in named_hooks(module)]


def named_hooks(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the same with the hooks themselves."""
    found = []
    for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        called = hook
        while isinstance(called, functools.partial):
            called = called.func
        kind = called if hasattr(called, "__qualname__") else type(called)
        name = f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', '')}"
        if not name.startswith(_LOOK_ONLY):
            found.append((name, hook))
    return found


def _slot(module: nn.Module) -> str:
    """Return where the module's shim is, or would be."""
    for slot in ("forward", COMPILED):
        shim = module.__dict__.get(slot)
        if isinstance(shim, Shim) and shim.module is module:
            return slot
    return COMPILED if module.__dict__.get(COMPILED) is not None else "forward"


def shim_of(module: nn.Module) -> Shim | None:
    """Return the installed shim, or None."""
    shim = module.__dict__.get(_slot(module))
    return shim if isinstance(shim, Shim) and shim.module is module else None


def attach(module: nn.Module) -> Shim:
    """Install the shim, or count one more user of the existing one."""
    with lock:
        slot = _slot(module)
        shim = module.__dict__.get(slot)
        if not isinstance(shim, Shim) or shim.module is not module:
            shim = Shim(module, slot)
            module.__dict__[slot] = shim
        shim.users += 1
        return shim


def detach(module: nn.Module) -> None:
    """Count one user less; the last one restores what was there. Leaves what others have put over the shim since."""
    with lock:
        slot = _slot(module)
        shim = module.__dict__.get(slot)
        if not isinstance(shim, Shim) or shim.module is not module:
            return
        shim.users -= 1
        if shim.users == 0:
            if shim.before is _ABSENT:
                del module.__dict__[slot]
            else:
                module.__dict__[slot] = shim.before


QUIET_RUNS = 4


class Needed:
    """Shims on the modules that runs of one kind must see: at first on all of them. Thread-safe.

    After `QUIET_RUNS` runs in a row that called no new ones, the modules inside these, and inside others of the lists
    that they are in, run without.
    """

    def __init__(self, paths: Mapping[nn.Module, str], above: Collection[str] = ()) -> None:
        """``above``: paths of modules whose own code matters, and so what it calls."""
        self._paths = paths
        self._above = frozenset(above)
        self._attached: list[nn.Module] = []
        self.hooks: dict[nn.Module, list[Any]] = {}
        """See `hooks_within`; cached."""
        self._bare: frozenset[nn.Module] = frozenset()
        self._quiet = 0
        self._count = 0
        self._all = False
        self.settled = False
        self.called: set[nn.Module] = set()
        """Modules that runs have called as a whole; runs add to it, and call `end_run`."""
        self.simple: set[type] = set()
        """Classes of arguments that runs need not examine; they add to it."""

    def attach(self) -> None:
        with lock:
            self._attach([one for one in self._paths if one not in self._bare])

    def _attach(self, modules: list[nn.Module]) -> None:
        for module in modules:
            attach(module)
        self._attached += modules

    def detach(self) -> None:
        with lock:
            for module in self._attached:
                detach(module)
            self._attached = []

    def end_run(self) -> None:
        """Called after a run without errors."""
        if self.settled or self._all:
            return
        with lock:
            self._quiet = self._quiet + 1 if len(self.called) == self._count else 0
            self._count = len(self.called)
            if self._quiet < QUIET_RUNS or not self._attached:
                return
            self.settled, self._bare = True, frozenset(self._within())
            for module in self._attached:
                if module in self._bare:
                    detach(module)
            self._attached = [module for module in self._attached if module not in self._bare]

    def _within(self) -> list[nn.Module]:
        """Return the modules inside those that were called, and inside others of their lists."""
        modules = {path: module for module, path in self._paths.items()}
        whole = {self._paths[module] for module in self.called}
        for path in list(whole):
            above = path.rpartition(".")[0]
            if isinstance(modules.get(above), nn.ModuleList):
                whole |= {f"{above}.{name}" for name, _ in modules[above].named_children()}
        whole -= self._above
        found = []
        for module, path in self._paths.items():
            parts = path.split(".")
            if any(".".join(parts[:count]) in whole for count in range(1, len(parts))):
                found.append(module)
        return found

    def hooks_within(self, module: nn.Module) -> list[Any]:
        """Return the forward hooks of each module in this one."""
        if module not in self.hooks:
            self.hooks[module] = [one._forward_hooks for one in module.modules() if one is not module]
        return self.hooks[module]

    def need_all(self) -> None:
        """Let runs see all modules from now on."""
        with lock:
            attached = set(self._attached)
            self._all, self.settled, self._bare = True, False, frozenset()
            self._attach([module for module in self._paths if module not in attached])
