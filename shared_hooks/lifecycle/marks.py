"""What a hook listens to: a marked function's stages, or an object's methods that are called as stages are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, TypeVar

from shared_hooks.errors import SpecError, near
from shared_hooks.lifecycle.conditions import Condition
from shared_hooks.lifecycle.events import Event
from shared_hooks.lifecycle.stages import Stage

Handler = Callable[[Event], object]
Function = TypeVar("Function", bound=Handler)
MARK: Final = "__isthmus_hook__"
PREFIXES: Final = ("before_", "after_", "on_")


class Priority(IntEnum):
    """Smaller numbers come first. Any integer from 0 to 100 will do; these are MMEngine's names for some
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
    """What `on` leaves on a function."""

    stages: tuple[Stage, ...]
    priority: int | str | None = None
    name: str | None = None
    when: Condition | None = None

    @classmethod
    def of(
        cls, stages: Iterable[Stage | str], priority: int | str | None, name: str | None, when: Condition | None
    ) -> HookMark:
        """Raises SpecError for no stage, and one that there is not."""
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
    """What `on` left, None on anything else."""
    mark = getattr(hook, MARK, None)
    return mark if isinstance(mark, HookMark) else None


def calls_of(hook: Any) -> Mapping[Stage, Handler]:
    """Stage -> what to call. Raises SpecError for an object without a stage, and for a method misspelt."""
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
    """Raises SpecError for what would do nothing or only fail when its stage comes, as far as can be seen."""
    what = f"{name_of(hook)}: {getattr(call, '__qualname__', type(call).__name__)}"
    if inspect.iscoroutinefunction(call) or inspect.isasyncgenfunction(call) or inspect.isgeneratorfunction(call):
        raise SpecError(f"{what} would not run: nobody awaits or iterates; a hook is a plain function")
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # something built in
        return
    try:
        signature.bind(None)
    except TypeError:
        raise SpecError(f"{what} is called with one argument, the event, but takes {signature}") from None


def priority_of(value: int | str | None) -> int:
    """As a number; None is NORMAL. Raises SpecError."""
    if value is None:
        return int(Priority.NORMAL)
    if isinstance(value, str) and value.upper() in Priority.__members__:
        return int(Priority[value.upper()])
    if isinstance(value, bool) or not isinstance(value, int) or not Priority.HIGHEST <= value <= Priority.LOWEST:
        names = ", ".join(f"{one.name} {one.value}" for one in Priority)
        raise SpecError(f"priority {value!r}: expected an integer from 0 to 100, or one of {names}")
    return int(value)


def name_of(hook: Any) -> str:
    """What a hook says it is called; else the function's or the class's name."""
    mark = mark_of(hook)
    own = mark.name if mark is not None else getattr(hook, "name", None)
    if isinstance(own, str) and own:
        return own
    return str(getattr(hook, "__name__", type(hook).__name__))
