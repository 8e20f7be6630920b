"""Reading a TOML table so that every mistake is named: the file, the key, what was expected and what was found."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn, TypeVar

from shared_hooks.errors import SpecError, near

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Value = TypeVar("Value")

_NAMES: dict[type, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "an array",
    dict: "a table",
}


def kind_of(value: object) -> str:
    """What a TOML value is, for messages: 'a string ("x")'; long values are cut."""
    shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
    return f"{_NAMES.get(type(value), type(value).__name__)} ({shown})"


class Table:
    """One table of a spec. ``take`` removes and checks a key; ``done`` complains about keys that nobody took.

    ``origin`` is the file (or whatever the text came from) and ``path`` the table's own name in it, both for messages.
    """

    def __init__(self, values: Mapping[str, object], origin: str, path: str = "") -> None:
        self.origin = origin
        self.path = path
        self._left = dict(values)
        self._known: list[str] = []

    @classmethod
    def read(cls, path: Path) -> Table:
        """The whole TOML file. Raises SpecError when it cannot be read or is not TOML."""
        try:
            with path.open("rb") as file:
                return cls(tomllib.load(file), str(path))
        except OSError as error:
            raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            if path.suffix == ".py":
                raise SpecError(
                    f'{path}: a Python file, not TOML; name what makes the model: "{path.stem}:Model"'
                ) from error
            raise SpecError(f"{path}: not valid TOML: {error}") from error

    def put(self, key: str, value: object) -> None:
        """In place of what the table says, or of nothing."""
        self._left[key] = value

    def name(self, key: str) -> str:
        """The key as a reader finds it: ``preprocess.size``."""
        return f"{self.path}.{key}" if self.path else key

    def fail(self, key: str, expected: str) -> NoReturn:
        """Raise SpecError: file, key, what was expected."""
        raise SpecError(f"{self.origin}: {self.name(key)}: {expected}")

    def __contains__(self, key: str) -> bool:
        return key in self._left

    def peek(self, key: str) -> object:
        """The value as it is, None when absent; it stays to be taken."""
        return self._left.get(key)

    def take_any(self, key: str) -> object:
        """The value as it is, None when absent."""
        self._known.append(key)
        return self._left.pop(key, None)

    def take(self, key: str, kind: type[Value], expected: str = "") -> Value | None:
        """The value of a key that may be absent, checked to be of ``kind``; integers pass for floats."""
        value = self.take_any(key)
        if value is None:
            return None
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            self.fail(key, f"expected {expected or _NAMES[kind]}, found {kind_of(value)}")
        return value

    def need(self, key: str, kind: type[Value], expected: str = "") -> Value:
        """As `take`, and raises SpecError when the key is absent."""
        value = self.take(key, kind, expected)
        if value is None:
            # A key spelt wrongly is the usual reason, so the near name comes first.
            found = difflib.get_close_matches(key, [left for left in self._left if left not in self._known], n=1)
            hint = f' (there is "{found[0]}": a misspelling?)' if found else ""
            self.fail(key, f"missing; expected {expected or _NAMES[kind]}{hint}")
        return value

    def take_list(self, key: str, kind: type[Value], expected: str) -> list[Value] | None:
        """A list whose items are all of ``kind`` (integers pass for float)."""
        items = self.take(key, list, expected)
        if items is None:
            return None
        found: list[Value] = []
        for item in items:
            value: object = float(item) if kind is float and type(item) is int else item
            if type(value) is not kind:
                self.fail(key, f"expected {expected}, found {kind_of(item)} in it")
            found.append(value)
        return found

    def choice(self, key: str, choices: Iterable[str], default: str) -> str:
        """One of a few strings."""
        value = self.take(key, str)
        if value is None:
            return default
        known = list(choices)
        if value not in known:
            self.fail(key, f'"{value}" is not one of {", ".join(known)}.{near(value, known)}')
        return value

    def table(self, key: str) -> Table | None:
        """The table of this name, None when absent."""
        values = self.take(key, dict)
        return None if values is None else Table(values, self.origin, self.name(key))

    def rest(self) -> dict[str, object]:
        """Everything not taken yet, taken now: for tables with free keys."""
        values, self._left = self._left, {}
        return values

    def done(self) -> None:
        """Raise SpecError if a key is left that nobody took."""
        for key in self._left:
            where = f"in [{self.path}]" if self.path else "at the top"
            self.fail(key, f"unknown key {where}; known: {', '.join(self._known)}.{near(key, self._known)}")
