"""Reading JSON so that every mistake is named: the place, what was expected, and what was found."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NoReturn, TypeVar

from shared_hooks.config import kind_of
from shared_hooks.errors import SpecError
from shared_hooks.metrics import STATUSES, Reading
from shared_hooks.profiling.quartiles import Quartiles

Value = TypeVar("Value")
LARGEST = 1 << 63


class Fields:
    """One JSON object. ``place``: where it is, for messages, such as ``edge.json: layers[3]``."""

    def __init__(self, data: object, place: str) -> None:
        if not isinstance(data, dict):
            raise SpecError(f"{place}: expected an object, found {_kind(data)}")
        self.data: dict[str, Any] = data
        self.place = place

    def fail(self, key: str, message: str) -> NoReturn:
        raise SpecError(f"{self.place}.{key}: {message}")

    def need(self, key: str) -> Any:
        """The value of a key that must be there."""
        if key not in self.data:
            self.fail(key, "missing")
        return self.data[key]

    def of(self, key: str, kind: type[Value], what: str) -> Value:
        """A value of exactly one type."""
        value = self.need(key)
        if type(value) is not kind:
            self.fail(key, f"expected {what}, found {_kind(value)}")
        return value

    def text(self, key: str) -> str:
        return self.of(key, str, "a string")

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        found = self.of(key, list, "a list of strings")
        if not all(type(one) is str for one in found):
            self.fail(key, "expected a list of strings")
        return tuple(found)

    def flag(self, key: str) -> bool:
        return self.of(key, bool, "true or false")

    def whole(self, key: str, least: int = 0) -> int:
        """A whole number."""
        value = self.of(key, int, f"a whole number of at least {least}")
        if not least <= value < LARGEST:
            self.fail(key, f"expected a whole number of at least {least}, found {value!r:.40}")
        return value

    def number(self, key: str, least: float = 0.0) -> float:
        """A finite number; negative ones only where ``least`` allows."""
        value = self.need(key)
        if type(value) not in (int, float) or not least <= value <= LARGEST:  # rejects NaN, too
            allowed = "a finite number" if least < 0 else f"a number of at least {least:g}"
            self.fail(key, f"expected {allowed}, found {_kind(value)}")
        return float(value)

    def choice(self, key: str, known: tuple[str, ...]) -> str:
        value = self.text(key)
        if value not in known:
            self.fail(key, f'expected {" or ".join(known)}, found "{value:.40}"')
        return value

    def inner(self, key: str) -> Fields:
        """An object in this one."""
        return Fields(self.need(key), f"{self.place}.{key}")

    def each(self, key: str) -> Iterator[Fields]:
        """The objects of a list."""
        for number, item in enumerate(self.of(key, list, "a list")):
            yield Fields(item, f"{self.place}.{key}[{number}]")

    def has(self, key: str) -> bool:
        """Whether there is a value, and it is not null."""
        return self.data.get(key) is not None

    def quartiles(self, key: str, least: float = 0.0) -> Quartiles:
        """{"median", "q1", "q3", "n"}: in order; and "middle"."""
        inner = self.inner(key)
        found = Quartiles(
            inner.number("median", least),
            inner.number("q1", least),
            inner.number("q3", least),
            inner.whole("n"),
            inner.number("middle", least),
        )
        slack = 1e-9 * max(abs(found.q1), abs(found.q3))
        if not found.q1 - slack <= found.median <= found.q3 + slack:
            raise SpecError(f"{inner.place}: expected q1 <= median <= q3")
        return found

    def reading(self, key: str) -> Reading:
        """{"value", "status", "note"}; a value exactly where it is not unavailable."""
        inner = self.inner(key)
        status = inner.choice("status", STATUSES)
        value = inner.number("value") if inner.has("value") else None
        try:
            return Reading(value, status, inner.text("note"))  # type: ignore[arg-type]
        except ValueError as error:
            raise SpecError(f"{inner.place}: {error}") from error


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return kind_of(value).replace("a table", "an object").replace("an array", "a list")
