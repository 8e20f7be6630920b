"""Declare options once, as fields of a dataclass: keyword arguments and command-line options.

    @dataclass(frozen=True, kw_only=True)
    class Measuring:
        repetitions: int = option(20, "N", "at most N forwards", parse=positive_int)

    add_options(parser, Measuring)  # --repetitions N; the help ends with "(default: 20)"

    @takes(Measuring)
    def measure(model, *, options): ...

    measure(model, repetitions=3)

Loads no torch: ``--help`` imports it.
"""

from __future__ import annotations

import argparse
import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
_OPTION = "option"


@dataclass(frozen=True)
class Option:
    """A field's command-line option. ``words``: its names, if not derived from the field's. ``exclusive``: at most one
    of the options with the same word may be given. ``key``: the expected value of a file's key with the field's name;
    None: there is none. ``how``: as `argparse.ArgumentParser` takes it.
    """

    metavar: str | None
    help: str
    parse: Callable[[str], Any] | None
    words: tuple[str, ...]
    exclusive: str
    key: type | None
    how: dict[str, Any]


def option(
    default: Any = MISSING,
    metavar: str | None = None,
    help: str = "",
    *,
    parse: Callable[[str], Any] | None = None,
    words: tuple[str, ...] = (),
    exclusive: str = "",
    key: type | None = None,
    **how: Any,
) -> Any:
    """Declare a field of a dataclass that is a command's option, too; without ``default`` it is required.

    One that is False by default is enabled by ``--name``, one that is True is disabled by ``--no-name``. ``parse``:
    converts the text; it raises ArgumentTypeError.
    """
    return field(default=default, metadata={_OPTION: Option(metavar, help, parse, words, exclusive, key, how)})


def option_of(each: Field[Any]) -> Option | None:
    """Return a field's option; None for one that is a keyword argument only."""
    found: Option | None = each.metadata.get(_OPTION)
    return found


def add_options(
    parser: argparse._ActionsContainer, options: type, but: type | None = None, *, unset: bool = False
) -> None:
    """Add the options of a dataclass to a command, without those of ``but``. ``unset``: options that are not given are
    None, for a command that also reads a file.
    """
    exclusive: dict[str, argparse._ActionsContainer] = {}
    others = set() if but is None else {each.name for each in fields(but)}
    for each in fields(options):
        declared = option_of(each)
        if declared is None or each.name in others:
            continue
        into = parser
        if declared.exclusive:
            if declared.exclusive not in exclusive:
                exclusive[declared.exclusive] = parser.add_mutually_exclusive_group()
            into = exclusive[declared.exclusive]
        how: dict[str, Any] = {"dest": each.name, "help": _help(declared, each.default), **declared.how}
        word = each.name.replace("_", "-")
        if each.default is MISSING:
            how["required"] = True
        else:
            how.setdefault("default", None if unset else each.default)
        if isinstance(each.default, bool) and "action" not in how:
            how["action"] = "store_false" if each.default else "store_true"
            word = f"no-{word}" if each.default else word
        if declared.metavar is not None:
            how["metavar"] = declared.metavar
        if declared.parse is not None:
            how["type"] = declared.parse
        into.add_argument(*(declared.words or (f"--{word}",)), **how)


def _help(declared: Option, default: object) -> str:
    """Return the help with the default appended, unless the text has one."""
    plain = default in (MISSING, None, "") or isinstance(default, (bool, tuple))
    if plain or "(default: " in declared.help:
        return declared.help
    shown = f"{default:g}" if isinstance(default, float) else str(default).replace("%", "%%")
    return f"{declared.help} (default: {shown})".lstrip()


class WithKeywords(Protocol[P, R_co]):
    """A function of up to three arguments, and of an options dataclass's fields as keyword arguments."""

    def __call__(
        self, first: Any, second: Any = ..., third: Any = ..., /, *args: P.args, **keywords: P.kwargs
    ) -> R_co: ...


def takes(options: Callable[P, Any]) -> Callable[[Callable[..., R]], WithKeywords[P, R]]:
    """Decorate a function that takes ``options``, an object of that dataclass, to take the dataclass's fields as
    keyword arguments instead.
    """
    assert isinstance(options, type)
    declared = fields(options)

    def decorate(function: Callable[..., R]) -> WithKeywords[P, R]:
        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> R:
            given = {each.name: keywords.pop(each.name) for each in declared if each.name in keywords}
            unknown = keywords.keys() - own.keys()
            if unknown:
                raise TypeError(f"{function.__name__}() got an unexpected keyword argument {min(unknown)!r}")
            return function(*args, options=options(**given), **keywords)

        signature = inspect.signature(function)
        own = {name: one for name, one in signature.parameters.items() if name != "options"}
        added = [
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if each.default is MISSING else each.default,
                annotation=each.type,
            )
            for each in declared
        ]
        call.__signature__ = signature.replace(parameters=[*own.values(), *added])  # type: ignore[attr-defined]
        return call

    return decorate


# Converters for the text of options. Each raises ArgumentTypeError.


def positive_int(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def non_negative_int(text: str) -> int:
    """Parse a whole number of at least 0."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return int(text)


def comma_separated(text: str) -> list[str]:
    """Parse names separated by commas."""
    return [name.strip() for name in text.split(",")]


def fraction(text: str) -> float:
    """Parse a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return value


def positive_seconds(text: str) -> float:
    """Parse a time above 0."""
    return _above_0(text, "a number of seconds")


def positive_number(text: str) -> float:
    """Parse a number above 0."""
    return _above_0(text, "a number")


def positive_numbers(text: str) -> list[float]:
    """Parse numbers above 0 separated by commas."""
    return [positive_number(one.strip()) for one in text.split(",")]


def non_negative_seconds(text: str) -> float:
    """Parse a time of 0 or more."""
    return 0.0 if text.strip() in ("0", "0.0") else positive_seconds(text)


def _above_0(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what} above 0")
    return value
