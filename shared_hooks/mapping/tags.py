"""Tags: where a module stands, in the names of classes, such as ``/BertModel/BertEncoder/BertLayer.0/BertAttention``.

Nothing is known about any library here. A class name alone is enough where no sibling has the same; an index or a name
follows it where it is an entry of a list or has siblings of its class. Modules that only hold others and cannot be
called (``ModuleList``, ``ModuleDict``) have a tag of their own, but stand in nobody else's.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Mapping

from torch import nn

from shared_hooks.modules import ROOT, ModuleInfo, Shim


def is_holder(module: nn.Module) -> bool:
    """Whether the module only holds others: it has no forward."""
    own = vars(module).get("forward")
    if isinstance(own, Shim):
        own = own.forward
    of_class = inspect.getattr_static(type(module), "forward")  # scripted modules make theirs when they are asked
    return of_class is nn.Module.forward and getattr(own, "__func__", own) in (None, nn.Module.forward)


def parent_of(path: str) -> str | None:
    """The path one level up; None for the model itself."""
    return None if path == ROOT else path.rpartition(".")[0] or ROOT


def tags_of(modules: Mapping[nn.Module, ModuleInfo]) -> dict[str, str]:
    """The tag of every module of `hierarchy.walk`, by path; no two are the same."""
    holders = {info.path for module, info in modules.items() if is_holder(module)} - {ROOT}
    types = {info.path: info.module_type for info in modules.values()}
    families: dict[str, list[str]] = defaultdict(list)
    for path in types:
        if path != ROOT:
            families[_stands_in(path, holders)].append(path)
    found = {ROOT: f"/{types[ROOT]}"} if ROOT in types else {}
    for path in types:  # parents come before their children
        for child, label in _labels(path, families.get(path, ()), types).items():
            found[child] = f"{found[path]}/{label}"
    return found


def _stands_in(path: str, holders: set[str]) -> str:
    """The nearest module above that is no holder."""
    above = parent_of(path) or ROOT
    while above in holders:
        above = parent_of(above) or ROOT
    return above


def _labels(parent: str, children: list[str] | tuple[()], types: Mapping[str, str]) -> dict[str, str]:
    same_class = Counter(types[child] for child in children)
    short: dict[str, str] = {}
    for child in children:
        key = child.rpartition(".")[2]
        alone = same_class[types[child]] == 1 and not key.isdecimal()
        short[child] = types[child] if alone else f"{types[child]}.{_quoted(key)}"
    taken = Counter(short.values())
    start = 0 if parent == ROOT else len(parent) + 1
    return {
        child: label if taken[label] == 1 else f"{types[child]}.{_quoted(child[start:])}"
        for child, label in short.items()
    }


def _quoted(key: str) -> str:
    """Names of modules may hold a slash, which would look like another level."""
    return key.replace("%", "%25").replace("/", "%2F")
