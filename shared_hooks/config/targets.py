"""``module:callable``: the one way in which a spec names code.

Only what the local user wrote (a spec file or a command line) is ever looked up here; no name that came over the
network is.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from shared_hooks.errors import SpecError, near

_added: set[Path] = set()


def looks_like_target(text: str) -> bool:
    """Whether the text has the form ``package.module:attribute``."""
    module, colon, attribute = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


def resolve(target: str, folder: Path, where: str) -> Callable[..., Any]:
    """The callable that ``module:callable`` names; as `lookup`, and raises SpecError for what cannot be called."""
    value = lookup(target, folder, where)
    if not callable(value):
        raise SpecError(f'{where}: "{target}" is {type(value).__name__}, not something to call')
    found: Callable[..., Any] = value
    return found


def lookup(target: str, folder: Path, where: str) -> Any:
    """What ``module:name`` names. ``where`` opens the messages, e.g. "net.toml: factory".

    A module that is not installed is looked for in ``folder`` (the spec file's own, or the current one), which is then
    appended to ``sys.path``: appended, so that it cannot hide an installed module. Raises SpecError.
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


def _import(name: str, folder: Path, where: str) -> ModuleType:
    root = name.partition(".")[0]
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != root or not _holds(folder, root):
            raise SpecError(f'{where}: cannot import "{name}": {error} (not installed, and not in {folder})') from error
        sys.path.append(str(folder))
        _added.add(folder)
        return _import(name, folder, where)
    except (Exception, SystemExit) as error:  # a script that ends itself when it is imported
        raise SpecError(f'{where}: importing "{name}" raised {type(error).__name__}: {error}') from error
    # Two specs in two folders may both have a "net.py"; Python keeps the first one imported and would build the wrong
    # model without a word.
    file = getattr(module, "__file__", None)  # None for built-in and namespace packages
    origin = Path(file).resolve() if file else None
    if origin and _holds(folder, root) and folder not in origin.parents and _added & set(origin.parents):
        raise SpecError(
            f'{where}: "{name}" was already imported from {origin}, not from {folder}; rename one of the two'
        )
    return module


def _holds(folder: Path, root: str) -> bool:
    return (folder / f"{root}.py").is_file() or (folder / root).is_dir()
