"""`Lifecycle`: the hooks of one side, in order, and the one function that calls them."""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import MethodType
from typing import Any, Final, TypeVar

from shared_hooks.config import Table, kind_of, lookup
from shared_hooks.errors import HookRefused, SpecError, near
from shared_hooks.lifecycle.log import Log, on_behalf, on_behalf_of
from shared_hooks.lifecycle.stages import About, Condition, Event, Stage

# The stages of a hook: those that mark a function, or an object's methods with the names of stages.

Handler = Callable[[Event], object]
Function = TypeVar("Function", bound=Handler)
MARK: Final = "__isthmus_hook__"
PREFIXES: Final = ("before_", "after_", "on_")


class Priority(IntEnum):
    """Smaller numbers come first. Any integer from 0 to 100 is valid; these are MMEngine's names for some
    (https://mmengine.readthedocs.io/en/latest/tutorials/hook.html).
    """

    HIGHEST = 0
    VERY_HIGH = 10
    HIGH = 30
    ABOVE_NORMAL = 40
    NORMAL = 50
    BELOW_NORMAL = 60
    LOW = 70
    VERY_LOW = 90
    LOWEST = 100


@dataclass(frozen=True, slots=True)
class HookMark:
    """What `on` attaches to a function."""

    stages: tuple[Stage, ...]
    priority: int | str | None = None
    name: str | None = None
    when: Condition | None = None

    @classmethod
    def of(
        cls, stages: Iterable[Stage | str], priority: int | str | None, name: str | None, when: Condition | None
    ) -> HookMark:
        """Raise SpecError without a stage, or for an unknown one."""
        found = tuple(dict.fromkeys(Stage.of(stage) for stage in stages))
        if not found:
            raise SpecError("on() needs a stage")
        return cls(found, priority, name, when)


def on(
    *stages: Stage | str,
    priority: int | str | None = None,
    name: str | None = None,
    when: Condition | None = None,
) -> Callable[[Function], Function]:
    """Marks a function ``(event)`` as a hook of these stages, to be registered later, by itself or by dotted name."""
    mark = HookMark.of(stages, priority, name, when)

    def put(function: Function) -> Function:
        if mark_of(function) is not None:
            raise SpecError(f"{name_of(function)} is marked already: one on() names all its stages")
        try:
            setattr(function, MARK, mark)
        except AttributeError:  # a method of an object, something built in
            raise SpecError(f"{name_of(function)} cannot be marked: write a function that calls it") from None
        return function

    return put


def mark_of(hook: object) -> HookMark | None:
    """Return what `on` attached, or None."""
    mark = getattr(hook, MARK, None)
    return mark if isinstance(mark, HookMark) else None


def calls_of(hook: Any) -> Mapping[Stage, Handler]:
    """Stage -> what to call. Raises SpecError for an object without a stage, and for a misspelt method."""
    if isinstance(hook, type):
        raise SpecError(f"{hook.__name__} is a class: make one of it, and register that")
    mark = mark_of(hook)
    if mark is not None:
        return dict.fromkeys(mark.stages, hook)
    found: dict[Stage, Handler] = {}
    names = [stage.value for stage in Stage]
    for name in dir(type(hook)):
        if mark_of(getattr(type(hook), name, None)) is not None:
            raise SpecError(f"{type(hook).__name__}.{name}: methods are named after stages; do not mark them")
    for name in sorted(name for name in dir(hook) if name.startswith(PREFIXES)):
        method = getattr(hook, name)
        if not callable(method):
            continue
        if name not in names:
            more = " A method that is no hook gets another name, or an underscore."
            raise SpecError(f"{type(hook).__name__}.{name}: there is no such stage.{near(name, names)}{more}")
        found[Stage.of(name)] = method
    if not found:
        what = "is not marked by on(stage)" if callable(hook) else "has no method that is called as a stage is"
        raise SpecError(f"{name_of(hook)} {what}; stages are {', '.join(names[:4])}, ... (edge-client hooks --stages)")
    return found


def check_call(hook: Any, call: Handler) -> None:
    """Raise SpecError for what would do nothing, or certainly fail, at its stage."""
    what = f"{name_of(hook)}: {getattr(call, '__qualname__', type(call).__name__)}"
    if inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call) or inspect.isgeneratorfunction(call):
        raise SpecError(f"{what} would not run: it is not awaited or iterated; a hook is a plain function")
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # something built in
        return
    try:
        signature.bind(None)
    except TypeError:
        raise SpecError(f"{what} is called with one argument, the event, but takes {signature}") from None


def priority_of(value: int | str | None) -> int:
    """Return a priority as a number; None is NORMAL. Raises SpecError."""
    if value is None:
        return int(Priority.NORMAL)
    if isinstance(value, str) and value.upper() in Priority.__members__:
        return int(Priority[value.upper()])
    if isinstance(value, bool) or not isinstance(value, int) or not Priority.HIGHEST <= value <= Priority.LOWEST:
        names = ", ".join(f"{one.name} {one.value}" for one in Priority)
        raise SpecError(f"priority {value!r}: expected an integer from 0 to 100, or one of {names}")
    return int(value)


def name_of(hook: Any) -> str:
    """Return a hook's own name, or the function's or class's."""
    mark = mark_of(hook)
    own = mark.name if mark is not None else getattr(hook, "name", None)
    if isinstance(own, str) and own:
        return own
    return str(getattr(hook, "__name__", type(hook).__name__))


log = logging.getLogger(__name__)


class HookListener:
    """One hook at one stage, and its cost so far."""

    def __init__(self, owner: Registered, stage: Stage, call: Handler, when: Condition | None) -> None:
        self.owner = owner
        self.stage = stage
        self.call = call
        self.when = when
        self.calls = 0
        self.cost_ns = 0
        self.failures = 0
        self.last_failure = ""
        self._lock = threading.Lock()  # several threads reach one stage
        self._inside: set[int] = set()  # threads

    def run(self, event: Event) -> HookRefused | None:
        """Call the hook if its condition holds; contains what it raises, except for a refusal where one is allowed.

        Even SystemExit is contained, because other threads wait for most stages. Ctrl-C in the main thread propagates.
        """
        thread = threading.get_ident()
        if thread in self._inside:  # the code of a hook may cause its own stage, which would never end
            return None
        self._inside.add(thread)
        began, acted = time.perf_counter_ns(), False
        try:
            acted = self.when is None or bool(self.when(event))
            if acted:
                self.call(event)
        except BaseException as error:
            # The error must not be kept here: with its traceback it would hold this frame, and the event's tensors.
            if isinstance(error, HookRefused) and self.stage is Stage.BEFORE_REQUEST:
                return error
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise
            self._failed(error)
        finally:
            self._inside.discard(thread)
            with self._lock:
                self.cost_ns += time.perf_counter_ns() - began
                self.calls += acted
        return None

    def _failed(self, error: BaseException) -> None:
        try:
            text = str(error)
        except Exception:
            text = "(it has no text)"
        with self._lock:
            self.failures += 1
            self.last_failure = f"{type(error).__name__}: {text}"
            first = self.failures == 1
        if first:  # a hook that fails at every request must not fill the log
            log.warning(
                "hook %s failed at %s: %s: %s",
                self.owner.name,
                self.stage.value,
                type(error).__name__,
                text,
                exc_info=error,
            )


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of a listing; cost in nanoseconds since registration."""

    stage: Stage
    name: str
    priority: int
    calls: int
    cost_ns: int
    failures: int
    last_failure: str


@dataclass(eq=False)
class Registered:
    """A hook with its name and place."""

    hook: Any
    name: str
    priority: int
    number: int
    listeners: tuple[HookListener, ...] = ()


class _Request(on_behalf_of):
    """The context of `Lifecycle.request`."""

    def __init__(self, thread: threading.local, about: About) -> None:
        self.account = about.account or None
        self._thread, self._about = thread, about

    def __enter__(self) -> None:
        self._request = getattr(self._thread, "request", None)
        self._thread.request = self._about
        self.before, on_behalf.account = on_behalf.account, self.account

    def __exit__(self, *_: object) -> None:
        on_behalf.account = self.before
        self._thread.request = self._request


class Lifecycle:
    """The hooks of one client, one server, or one `WrappedModel` by itself (``side`` "local"). Thread-safe.

    `emit` calls the hooks of a stage by priority, equal ones by registration, in the thread that reached the stage:
    their time is its time. What a hook raises is logged the first time, counted (`listing`) and contained, with one
    exception: `HookRefused` at ``before_request`` refuses the request, after the stage's other hooks have been called;
    if several refuse, the first is reported.

    A hook may use the model, the client and torch, and register and remove hooks. It is not called recursively at a
    stage that it causes. No lock is held that it could wait for, but these wait for it: a client's other requests, at
    its first plan; the connection's own threads (connect, handshake, send, receive, disconnect, reconnect, drain),
    where an `infer` would wait for itself until its deadline; and the place of its request, which counts as in
    progress.
    """

    def __init__(self, side: str = "local") -> None:
        self.side = side
        self._hooks: list[Registered] = []
        self._at: dict[Stage, tuple[HookListener, ...]] = {}
        self._registered = 0
        self._lock = threading.Lock()
        self._thread = threading.local()

    def emit(self, stage: Stage, request: About | None = None, **facts: Any) -> None:
        """Call the hooks of a stage. ``request``: the one that it belongs to; by default the thread's (`request`)."""
        listeners = self._at.get(stage)
        if listeners is None:
            return
        event = Event(stage, self.side, request or getattr(self._thread, "request", None), facts)
        refused = None
        for listener in listeners:
            refusal = listener.run(event)
            refused = refused or refusal
        if refused is not None:
            try:
                raise refused
            finally:
                refused = refusal = None  # its traceback has this frame, and the frame has the event

    @property
    def current(self) -> About | None:
        """The request that this thread works for, or None."""
        found: About | None = getattr(self._thread, "request", None)
        return found

    def request(self, about: About) -> AbstractContextManager[None]:
        """Assign what this thread does in the block to this request."""
        return _Request(self._thread, about)

    def register(
        self,
        hook: Any,
        *,
        name: str | None = None,
        priority: int | str | None = None,
        when: Condition | None = None,
        replace: bool = False,
    ) -> str:
        """Register an object by its methods (``after_head(event)``), or a function marked by `on`; returns its name.

        ``name`` and ``priority`` default to the hook's own attributes of these names, or to its class's or function's
        name and NORMAL. ``replace`` replaces the one of that name, within its priority. Raises SpecError for an unknown
        stage, or one that does not exist on this side, an invalid priority or name, or a function that does not take
        one argument, or is `async` or a generator.
        """
        mark = mark_of(hook) or HookMark((), getattr(hook, "priority", None))
        return self._mount(hook, calls_of(hook), mark, name, priority, when, replace)

    def _mount(
        self,
        hook: Any,
        calls: Mapping[Stage, Handler],
        mark: HookMark,
        name: str | None = None,
        priority: int | str | None = None,
        when: Condition | None = None,
        replace: bool = False,
    ) -> str:
        calls = self._here(calls)
        if not calls:
            raise SpecError(f"{name_of(hook)}: this side has none of its stages ({self.side})")
        for call in calls.values():
            check_call(hook, call)
        place = priority_of(mark.priority if priority is None else priority)
        with self._lock:
            name = self._free_name(hook, name, replace)
            number = next((one.number for one in self._hooks if one.name == name), self._registered)
            made = Registered(hook, name, place, number)
            condition = when or mark.when
            made.listeners = tuple(HookListener(made, stage, call, condition) for stage, call in calls.items())
            self._registered += 1
            self._set([*(one for one in self._hooks if one.name != name), made])
        return name

    def calls(self, hook: Any) -> Mapping[Stage, Handler]:
        """Stage -> what would be called of a hook, for the stages of this side. Raises SpecError."""
        return self._here(calls_of(hook))

    def _here(self, calls: Mapping[Stage, Handler]) -> Mapping[Stage, Handler]:
        return {stage: call for stage, call in calls.items() if stage.comes(self.side)}

    def on(
        self,
        *stages: Stage | str,
        priority: int | str | None = None,
        name: str | None = None,
        when: Condition | None = None,
    ) -> Callable[[Function], Function]:
        """Return a decorator that registers a function at once."""
        mark = HookMark.of(stages, priority, None, when)

        def put(function: Function) -> Function:
            self._mount(function, dict.fromkeys(mark.stages, function), mark, name)
            return function

        return put

    def remove(self, hook: Any) -> None:
        """Remove the hook of this name, or this object. Raises SpecError if there is none."""
        with self._lock:
            gone = [
                one for one in self._hooks if (one.name == hook if isinstance(hook, str) else _same(one.hook, hook))
            ]
            left = [one for one in self._hooks if one not in gone]
            if not gone:
                known = [one.name for one in self._hooks]
                name = hook if isinstance(hook, str) else name_of(hook)
                listed = ", ".join(known) or "none"
                raise SpecError(f'no hook called "{name[:80]}" is registered.{near(name, known)} There is: {listed}')
            self._set(left)

    @property
    def hooks(self) -> tuple[Any, ...]:
        """The registered hooks, in the order of registration."""
        return tuple(one.hook for one in sorted(self._hooks, key=lambda one: one.number))

    def listing(self) -> list[Listed]:
        """Return the hooks by stage, in the order in which they are called, with their cost so far."""
        return [
            Listed(
                stage,
                one.owner.name,
                one.owner.priority,
                one.calls,
                one.cost_ns,
                one.failures,
                one.last_failure,
            )
            for stage in Stage
            for one in self._at.get(stage, ())
        ]

    def _free_name(self, hook: Any, name: str | None, replace: bool) -> str:
        taken = {one.name for one in self._hooks}
        wanted = name or name_of(hook)
        if replace:
            if wanted not in taken:
                raise SpecError(f'no hook called "{wanted}" is there to be replaced.{near(wanted, taken)}')
            return wanted
        if name is not None and name in taken:
            raise SpecError(f'a hook called "{name}" is registered already; replace it, or give this one another name')
        numbered = (f"{wanted}#{number}" for number in range(2, len(taken) + 3))
        return wanted if wanted not in taken else next(one for one in numbered if one not in taken)

    def _set(self, hooks: list[Registered]) -> None:
        """Sort the hooks into a new table; a thread that is dispatching continues with the old one."""
        self._hooks = hooks
        at: dict[Stage, list[HookListener]] = {}
        for one in sorted(hooks, key=lambda one: (one.priority, one.number)):
            for listener in one.listeners:
                at.setdefault(listener.stage, []).append(listener)
        self._at = {stage: tuple(listeners) for stage, listeners in at.items()}


def _same(one: Any, other: Any) -> bool:
    """Return whether they are one object; a method is a new object at every access."""
    return one is other or (isinstance(one, MethodType) and isinstance(other, MethodType) and one == other)


# Hooks of a process: the default one, those of installed packages (entry points), and those its TOML file names.
#
# [lifecycle]
# hooks = [
#     "my_hooks:Watchdog",             # a class (made without arguments), a function marked by `on`, or an object
#     { hook = "my_hooks:Slow", name = "slow", priority = "LOW", options = { milliseconds = 50 } },
#     { hook = "my_hooks:MyLog", name = "log", replace = true },
# ]
# remove = ["log"]                     # of the default hook and the packages' hooks
# entry_points = false                 # none of packages; absent = all of the group "isthmus.hooks"
#
# Only what the local user wrote is looked up here: no name that came over the network is.


GROUP: Final = "isthmus.hooks"
LOGGERS: Final = {"edge": "edge_client", "cloud": "cloud_server"}


def default(side: str) -> Lifecycle:
    """Return a lifecycle with only the default hook. ``side``: "edge" or "cloud"."""
    made = Lifecycle(side)
    made.register(Log(LOGGERS[side]))
    return made


def load(side: str, table: Table | None, folder: Path) -> Lifecycle:
    """Return the hooks of a ``[lifecycle]`` table (None: no table); its modules may lie in ``folder``. Raises
    SpecError.
    """
    made = default(side)
    table = table or Table({}, "lifecycle")
    hooks = table.take("hooks", list) or []
    remove = table.take_list("remove", str, "names") or []
    packages = table.take("entry_points", bool)
    table.done()
    if packages is None or packages:
        for entry in entry_points(group=GROUP):
            try:
                hook = _plugged(entry)
                if made.calls(hook):  # it may be meant for the other side
                    made.register(hook, name=entry.name)
            except SpecError as error:
                where = f'hook "{entry.name}" of an installed package ({entry.value})'
                raise SpecError(f"{where}: {error}; entry_points = false in [lifecycle] leaves packages out") from error
    for entry in hooks:
        _register(made, table, entry, folder)
    for name in remove:
        try:
            made.remove(name)
        except SpecError as error:
            table.fail("remove", str(error))
    return made


def read(side: str, path: Path | None, beside: Iterable[str] = ()) -> Lifecycle:
    """Read a file whose only tables are ``[lifecycle]`` and those in ``beside``, which belong to the caller."""
    if path is None:
        return load(side, None, Path.cwd())
    file = Table.read(path)
    table = file.table("lifecycle")
    for name in beside:
        file.table(name)
    file.done()
    return load(side, table, path.resolve().parent)


def _register(made: Lifecycle, table: Table, value: object, folder: Path) -> None:
    if isinstance(value, str):
        value = {"hook": value}
    if not isinstance(value, dict):
        table.fail("hooks", f'expected "module:name" or a table, found {kind_of(value)}')
    entry = Table(value, table.origin, table.name("hooks"))
    target = entry.need("hook", str)
    name, replace, options = entry.take("name", str), entry.take("replace", bool), entry.table("options")
    priority = entry.take_any("priority")
    entry.done()
    where = f"{table.origin}: {table.name('hooks')}"
    if not isinstance(priority, (int, str, type(None))):
        table.fail("hooks", f"priority: expected an integer or a name, found {kind_of(priority)}")
    hook = _made(lookup(target, folder, where), options.rest() if options else {}, f"{where}: {target}")
    try:
        made.register(hook, name=name, priority=priority, replace=bool(replace))
    except SpecError as error:
        raise SpecError(f"{where}: {target}: {error}") from error


def _made(hook: Any, options: dict[str, Any], where: str) -> Any:
    """Return an instance of a class; anything else unchanged."""
    if not isinstance(hook, type):
        if options:
            raise SpecError(f"{where}: options are for classes, and this is {type(hook).__name__}")
        return hook
    try:
        return hook(**options)
    except (Exception, SystemExit) as error:
        raise SpecError(f"{where}: making it raised {type(error).__name__}: {error}") from error


def _plugged(entry: EntryPoint) -> Any:
    try:
        hook = entry.load()
    except (Exception, SystemExit) as error:
        raise SpecError(f"loading it raised {type(error).__name__}: {error}") from error
    return _made(hook, {}, entry.value)


# A listing of hooks as lines of text: stage by stage, in the order in which they are called, with their cost.


HEADERS = ("stage", "hook", "priority", "calls", "failures", "total ms", "us a call")


def is_default(lifecycle: Lifecycle) -> bool:
    """Return whether only built-in hooks are registered."""
    return all(getattr(hook, "built_in", False) for hook in lifecycle.hooks)


def rows(lifecycle: Lifecycle) -> list[tuple[str, ...]]:
    """Return the listing as text, in the columns of `HEADERS`; a stage is named at its first hook."""
    found: list[tuple[str, ...]] = []
    before = None
    for one in lifecycle.listing():
        stage = one.stage.value if one.stage is not before else ""
        before = one.stage
        a_call = f"{one.cost_ns / one.calls / 1e3:.1f}" if one.calls else "-"
        numbers = (str(one.priority), str(one.calls), str(one.failures), f"{one.cost_ns / 1e6:.3f}", a_call)
        found.append((stage, one.name, *numbers))
    return found


def lines(lifecycle: Lifecycle) -> Iterator[str]:
    """Yield the listing as a table with fixed columns."""
    table = [HEADERS, *rows(lifecycle)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        names = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        yield "  ".join([*names, *numbers])
