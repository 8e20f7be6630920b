"""Read TOML tables strictly, look up callables, and check the host names of HTTP requests.

A page of another site, open in a browser on this machine, may have its own name resolve to 127.0.0.1 and then read what
is served there (DNS rebinding). Its name is in `Host`; an address cannot be rebound.
"""

from __future__ import annotations

import difflib
import importlib
import ipaddress
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeVar

from shared_hooks.errors import SpecError, near

FORMS = frozenset({"text/plain", "multipart/form-data", "application/x-www-form-urlencoded"})
"""Content types that any page may send to any site without a preflight request."""


def is_own(host: str, listened: str) -> bool:
    """Return whether a `Host` header names this machine: localhost, the name listened on, or an address (a loopback one
    if only that is listened on).
    """
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    if name.lower() in ("localhost", listened.lower()):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or not is_loopback(listened)


def is_loopback(host: str) -> bool:
    """Return whether an address or name is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def why_not(host: str | None, reached: str, origin: str | None, kind: str) -> str:
    """Return why a request is refused; empty if it is not. ``reached``: the address of this machine at which it
    arrived; ``kind``: of its body. Requests from other machines may use any name.
    """
    if host is not None and is_loopback(reached) and not is_own(host, reached):
        return f"the host {host[:100]!r} is not this machine: ask by its address, or localhost"
    if origin is not None and (host is None or origin.partition("://")[2] != host):
        return "another origin's page may not ask here"
    if kind.partition(";")[0].strip().lower() in FORMS:
        return "a request's body is application/json, or application/octet-stream: say so in Content-Type"
    return ""


# Reads a TOML table so that every mistake is reported: the file, the key, the expected and the found value.


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
    """Describe a TOML value for messages: 'a string ("x")'; long values are cut."""
    shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
    return f"{_NAMES.get(type(value), type(value).__name__)} ({shown})"


class Table:
    """One table of a spec. ``take`` removes and checks a key; ``done`` raises for keys that were not taken.

    ``origin`` is the file (or other source) and ``path`` the table's own name in it, both for messages.
    """

    def __init__(self, values: Mapping[str, object], origin: str, path: str = "") -> None:
        self.origin = origin
        self.path = path
        self._left = dict(values)
        self._known: list[str] = []

    @classmethod
    def read(cls, path: Path) -> Table:
        """Read a whole TOML file. Raises SpecError if it cannot be read or is not TOML."""
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
        """Set a value, replacing the table's."""
        self._left[key] = value

    def name(self, key: str) -> str:
        """Return the key's full name: ``preprocess.size``."""
        return f"{self.path}.{key}" if self.path else key

    def fail(self, key: str, expected: str) -> NoReturn:
        """Raise SpecError with file, key, and what was expected."""
        raise SpecError(f"{self.origin}: {self.name(key)}: {expected}")

    def __contains__(self, key: str) -> bool:
        return key in self._left

    def peek(self, key: str) -> object:
        """Return the value as it is, None if absent, without taking it."""
        return self._left.get(key)

    def take_any(self, key: str) -> object:
        """Take the value as it is, None if absent."""
        self._known.append(key)
        return self._left.pop(key, None)

    def take(self, key: str, kind: type[Value], expected: str = "") -> Value | None:
        """Take the value of an optional key, checked to be of ``kind``; integers pass as floats."""
        value = self.take_any(key)
        if value is None:
            return None
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            self.fail(key, f"expected {expected or _NAMES[kind]}, found {kind_of(value)}")
        return value

    def need(self, key: str, kind: type[Value], expected: str = "") -> Value:
        """Take a required key, as `take`. Raises SpecError if absent."""
        value = self.take(key, kind, expected)
        if value is None:
            # A misspelt key is the usual reason, so the near name comes first.
            found = difflib.get_close_matches(key, [left for left in self._left if left not in self._known], n=1)
            hint = f' (there is "{found[0]}": a misspelling?)' if found else ""
            self.fail(key, f"missing; expected {expected or _NAMES[kind]}{hint}")
        return value

    def take_list(self, key: str, kind: type[Value], expected: str) -> list[Value] | None:
        """Take a list whose items are all of ``kind`` (integers pass as floats)."""
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
        """Take one of a few strings."""
        value = self.take(key, str)
        if value is None:
            return default
        known = list(choices)
        if value not in known:
            self.fail(key, f'"{value}" is not one of {", ".join(known)}.{near(value, known)}')
        return value

    def table(self, key: str) -> Table | None:
        """Take the table of this name, None if absent."""
        values = self.take(key, dict)
        return None if values is None else Table(values, self.origin, self.name(key))

    def rest(self) -> dict[str, object]:
        """Take everything left, for tables with free keys."""
        values, self._left = self._left, {}
        return values

    def done(self) -> None:
        """Raise SpecError if a key was not taken."""
        for key in self._left:
            where = f"in [{self.path}]" if self.path else "at the top"
            self.fail(key, f"unknown key {where}; known: {', '.join(self._known)}.{near(key, self._known)}")


# ``module:callable``: the one form in which a spec names code. Only what the local user wrote (a spec file or a
# command line) is ever looked up here; no name from the network is.


_added: set[Path] = set()


def looks_like_target(text: str) -> bool:
    """Return whether the text has the form ``package.module:attribute``."""
    module, colon, attribute = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


def resolve(target: str, folder: Path, where: str) -> Callable[..., Any]:
    """Return the callable that ``module:callable`` names, as `lookup`. Raises SpecError if it cannot be called."""
    value = lookup(target, folder, where)
    if not callable(value):
        raise SpecError(f'{where}: "{target}" is {type(value).__name__}, not something to call')
    found: Callable[..., Any] = value
    return found


def lookup(target: str, folder: Path, where: str) -> Any:
    """Return what ``module:name`` names. ``where`` prefixes messages, e.g. "net.toml: factory".

    A module that is not installed is searched in ``folder`` (the spec file's own, or the current one), which is then
    appended to ``sys.path``, so that it cannot hide an installed module. Raises SpecError.
    """
    if not looks_like_target(target):
        raise SpecError(f'{where}: expected "module:callable", found "{target}"')
    module_name, _, attribute_path = target.partition(":")
    value: Any = _import(module_name, folder, where)
    for attribute in attribute_path.split("."):
        try:
            value = getattr(value, attribute)
        except AttributeError:
            known = [name for name in dir(value) if not name.startswith("__")]
            raise SpecError(f'{where}: "{module_name}" has no "{attribute_path}".{near(attribute, known)}') from None
    return value


def raised(error: BaseException) -> str:
    """Describe an error of a user's code for a message: its innermost cause, with file and line."""
    while error.__cause__ is not None:
        error = error.__cause__
    at = ""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if "<frozen" not in one.filename]
    if frames:
        at = f" ({frames[-1].filename}:{frames[-1].lineno})"
    return f"{type(error).__name__}: {error}{at}"


def _import(name: str, folder: Path, where: str) -> ModuleType:
    root = name.partition(".")[0]
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name and error.name != root:  # it exists, and one of its own imports fails
            raise SpecError(f'{where}: importing "{name}" raised {raised(error)}; install what is missing') from error
        if not _holds(folder, root):
            raise SpecError(f'{where}: cannot import "{name}": {error} (not installed, and not in {folder})') from error
        sys.path.append(str(folder))
        _added.add(folder)
        return _import(name, folder, where)
    except (Exception, SystemExit) as error:  # a script that exits when it is imported
        raise SpecError(f'{where}: importing "{name}" raised {raised(error)}') from error
    # Two specs in two folders may both have a "net.py"; Python keeps the first one imported and would silently build
    # the wrong model.
    file = getattr(module, "__file__", None)  # None for built-in and namespace packages
    origin = Path(file).resolve() if file else None
    if origin and _holds(folder, root) and folder not in origin.parents and _added & set(origin.parents):
        raise SpecError(
            f'{where}: "{name}" was already imported from {origin}, not from {folder}; rename one of the two'
        )
    return module


def _holds(folder: Path, root: str) -> bool:
    return (folder / f"{root}.py").is_file() or (folder / root).is_dir()
