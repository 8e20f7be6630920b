"""Changes of a state on the wire. Steps of one generation change a state alike: lengths grow by one. They are said as
differences, and what is said exactly as in the step before is said by ``1``.

    ["+m", shape difference, stride difference]    ["+v", difference] of a number    ["+i", difference] of one integer
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from shared_hooks.errors import MALFORMED, BadFrame
from shared_hooks.generation.allowance import weight
from shared_hooks.generation.forms import Form, Node, Path, plain
from shared_hooks.generation.mirror import Change

Known = Callable[[Path], Form]
AGAIN = 1


class Changes:
    """One direction of one session."""

    def __init__(self) -> None:
        self._said: Any = None

    def said(self, changes: list[Change]) -> Any:
        """For JSON."""
        groups: dict[Any, tuple[Any, list[Any]]] = {}
        for path, form, before in changes:
            difference = _difference(before, form)
            try:
                groups.setdefault(difference, (difference, []))[1].append(path)
            except TypeError:  # a whole object: lists cannot be looked up
                groups[path] = difference, [path]
        said = list(groups.values())
        if said == self._said:
            return AGAIN
        self._said = said
        return said

    def heard(self, known: Known, reported: Any) -> list[tuple[Path, Any]]:
        """The changes: path and form. Raises BadFrame."""
        if reported == AGAIN and type(reported) is int:
            if self._said is None:
                raise BadFrame("the changes of a state are those of the step before, and there is none")
        else:
            self._said = reported
        found = []
        try:
            for form, paths in self._said:
                found += [(tuple(path), _sum(known(tuple(path)), form)) for path in paths]
        except MALFORMED as error:
            raise BadFrame(f"malformed changes of a state: {error!s:.120}") from error
        return found

    @property
    def nbytes(self) -> int:
        """About what it takes in memory."""
        return weight(self._said)

    def copied(self) -> Changes:
        """For a session that continues from here on its own."""
        made = Changes()
        made._said = self._said
        return made


def _difference(before: Form, form: Form) -> Any:
    if before is None or isinstance(before, Node) or isinstance(form, Node) or before[0] != form[0]:
        return plain(form)
    kind = form[0]
    if kind == "m" and len(before[1]) == len(form[1]) and len(before[2]) == len(form[2]) and before[3] == form[3]:
        return "+m", _less(form[1], before[1]), _less(form[2], before[2])
    if kind == "v" and type(form[1]) is int and type(before[1]) is int:
        return "+v", form[1] - before[1]
    if kind == "i" and type(form[2]) is int and type(before[2]) is int and before[1] == form[1]:
        return "+i", form[2] - before[2]
    return plain(form)


def _sum(before: Form, form: Any) -> Any:
    kind = form[0]
    if not kind.startswith("+"):
        return form
    if before is None or isinstance(before, Node) or before[0] != kind[1:]:
        raise ValueError("a difference to something else")
    if kind == "+m":
        return "m", _more(before[1], form[1]), _more(before[2], form[2]), before[3]
    if kind == "+v":
        return "v", before[1] + form[1]
    return "i", before[1], before[2] + form[1]


def _less(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(operator.sub, one, other))


def _more(one: tuple[int, ...], other: list[int]) -> tuple[int, ...]:
    if len(one) != len(other):
        raise ValueError("a difference of another length")
    return tuple(map(operator.add, one, other))
