"""Hooks of a process: the default one, those of installed packages (entry points), and those its TOML file names.

[lifecycle]
hooks = [
    "my_hooks:Watchdog",             # a class (made without arguments), a function marked by `on`, or an object
    { hook = "my_hooks:Slow", name = "slow", priority = "LOW", options = { milliseconds = 50 } },
    { hook = "my_hooks:MyLog", name = "log", replace = true },
]
remove = ["log"]                     # of the default hook and the packages' hooks
entry_points = false                 # none of packages; absent = all of the group "isthmus.hooks"

Only what the local user wrote is looked up here: no name that came over the network is.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Final

from shared_hooks.config import Table, kind_of, lookup
from shared_hooks.errors import SpecError
from shared_hooks.lifecycle.log import Log
from shared_hooks.lifecycle.registry import Lifecycle

GROUP: Final = "isthmus.hooks"
LOGGERS: Final = {"edge": "edge_client", "cloud": "cloud_server"}


def default(side: str) -> Lifecycle:
    """With the default hook alone. ``side``: "edge" or "cloud"."""
    made = Lifecycle(side)
    made.register(Log(LOGGERS[side]))
    return made


def load(side: str, table: Table | None, folder: Path) -> Lifecycle:
    """The hooks of a ``[lifecycle]`` table, None for none; its modules may lie in ``folder``. Raises SpecError."""
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
                if made.calls(hook):  # it may be for the other side
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
    """Read a file whose only tables are ``[lifecycle]`` and those ``beside`` it, which are the caller's."""
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
    """An object of a class; anything else as it is."""
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
