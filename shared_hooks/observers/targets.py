"""Which modules an observer looks at: names, globs, regular expressions, types, groups, modules themselves."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

from torch import nn

from shared_hooks.errors import UnknownLayer, near, near_path
from shared_hooks.modules import ROOT, walk
from shared_hooks.observers import groups

Target: TypeAlias = "str | re.Pattern[str] | type[nn.Module] | nn.Module"
Targets: TypeAlias = "Target | Iterable[Target]"


def resolve(model: nn.Module, targets: Targets) -> dict[nn.Module, str]:
    """The matching modules of ``model`` with their names, in definition order.

    A target is a module's name (``"(model)"`` or ``""`` is the model itself), a glob (``*`` crosses dots), a regular
    expression (``re.compile(...)`` or ``"re:..."``, searched in the name), a type, the name of a type as
    ``"type:Conv2d"``, a group as ``"group:vision"`` (see `groups`), or a module. Raises UnknownLayer for one that
    matches nothing, with names that are near.
    """
    # a scripted or compiled module runs out of sight: nothing inside it
    infos = walk(model, None)
    names = {info.path: module for module, info in infos.items()}
    for name, module in model.named_modules(remove_duplicate=False):
        if module in infos:
            names.setdefault(name or ROOT, module)
    found: set[nn.Module] = set()
    several = isinstance(targets, Iterable) and not isinstance(targets, (str, bytes, type, nn.Module))
    wanted: list[Any] = list(targets) if several else [targets]  # type: ignore[arg-type]
    if not wanted:
        raise UnknownLayer("no target was given; None stands for the observer's default")
    for target in wanted:
        matching = _matching(model, names, target)
        if not matching:
            raise UnknownLayer(_nothing(target, names))
        found.update(matching)
    return {module: info.path for module, info in infos.items() if module in found}


def _matching(model: nn.Module, names: dict[str, nn.Module], target: Any) -> list[nn.Module]:
    if isinstance(target, nn.Module):
        return [module for module in names.values() if module is target]
    if isinstance(target, type):
        return [module for module in names.values() if isinstance(module, target)]
    if isinstance(target, re.Pattern):
        return [module for name, module in names.items() if target.search(name)]
    if not isinstance(target, str):
        raise UnknownLayer(f"a target is a name, a pattern, a type or a module, not {type(target).__name__}")
    if target in names or target == "":
        return [names[target or ROOT]]
    kind, _, rest = target.partition(":")
    if kind == "re":
        try:
            return _matching(model, names, re.compile(rest))
        except re.error as error:
            raise UnknownLayer(f"{target!r} is not a regular expression: {error}") from error
    if kind == "type":
        return [module for module in names.values() if any(base.__name__ == rest for base in type(module).__mro__[:-1])]
    if kind == "group":
        inside = groups.find(model).get(rest, ())
        return [names[name] for name in inside if name in names]
    return [module for name, module in names.items() if fnmatch.fnmatchcase(name, target)]


def _nothing(target: Any, names: dict[str, nn.Module]) -> str:
    if isinstance(target, nn.Module):
        return f"the module of type {type(target).__name__} is not part of the model"
    if isinstance(target, type) or (isinstance(target, str) and target.startswith("type:")):
        wanted = target.__name__ if isinstance(target, type) else target[5:]
        known = sorted({type(module).__name__ for module in names.values()})
        return f"no module is a {wanted}.{near(wanted, known) or _some(known)}"
    if isinstance(target, str) and target.startswith("group:"):
        return f"no module is in the group {target[6:]!r}.{near(target[6:], groups.RULES) or _some(list(groups.RULES))}"
    text = target.pattern if isinstance(target, re.Pattern) else target
    plain = re.sub(r"^re:|[\\*?^$()\[\]+|]", "", text)
    return f"no module is called {text!r}.{near_path(plain, names) or _some(list(names))}"


def _some(names: list[str]) -> str:
    more = ", ..." if len(names) > 8 else ""
    return f" There are {', '.join(names[:8])}{more}."


def _is_leaf(module: nn.Module) -> bool:
    # quantised modules of torch keep their weights in children that are never called
    return next(module.children(), None) is None or type(module).__module__.startswith("torch.ao.nn")


def leaves(model: nn.Module) -> dict[nn.Module, str]:
    """What observers look at by default: modules without children, and attention as a whole."""
    found: dict[nn.Module, str] = {}
    inside: set[nn.Module] = set()
    for module, info in walk(model, None).items():
        if isinstance(module, nn.MultiheadAttention):
            inside.update(list(module.modules())[1:])
            found[module] = info.path
        elif module not in inside and (info.opaque or _is_leaf(module)):
            found[module] = info.path
    return found
