"""Which module a generation is cut after, where somebody names it."""

from __future__ import annotations

from typing import Final

from torch import nn

from edge_client.modes import WORDS
from shared_hooks.errors import CutRefused, SpecError, UnknownLayer, near
from shared_hooks.observers import groups

GROUP: Final = "group:"
TOWERS: Final = ("vision", "audio", "fusion")
"""Groups of modules (`shared_hooks.observers.groups`) whose results go into a language model."""
MOST: Final = 3
"""Lists of blocks that a message names."""
NEAR: Final = 0.6
"""How near a name is that may have been meant."""


def check_cut(model: nn.Module, cut: object) -> str:
    """``cut``, a module's path (``#n`` for its n-th call), if a generation can be cut there as far as names tell; for
    "group:vision" and its like what `group_cut` says.

    Raises SpecError for what is no name, UnknownLayer with near names, CutRefused for words that mean no module.
    """
    if not isinstance(cut, str) or not cut:
        raise SpecError(f"a generation is cut after a module, by its path; found {cut!r:.60}.{_blocks_told(model)}")
    if cut in (*WORDS, "input"):
        raise CutRefused(
            f'"{cut}" is no cut of a generation: the token ids stay here, and a module behind them gives what crosses.'
            f"{_blocks_told(model)}"
        )
    if cut.startswith(GROUP):
        return group_cut(model, cut.removeprefix(GROUP))
    known = {path for path, module in model.named_modules() if path and not isinstance(module, _LISTS)}
    path = cut.partition("#")[0]
    if path not in known and path not in dict(model.named_modules()):  # of lists the engine says more
        found = near(path, known, NEAR)
        raise UnknownLayer(f'no layer "{cut}".{found or _blocks_told(model)}')
    return cut


def group_cut(model: nn.Module, group: str) -> str:
    """The cut that has a group of modules ("vision", "audio", "fusion") here and the language model there: after the
    first block of the language model, because what comes before it are the words themselves.

    Raises UnknownLayer for a group that the model does not have, CutRefused for one that is not before the language.
    """
    found = groups.find(model)
    if group not in found:
        has = ", ".join(found) or "none"
        raise UnknownLayer(f'the model has no group "{group}" (it has: {has}).{_blocks_told(model)}')
    if group not in TOWERS:
        raise CutRefused(f'"{GROUP}{group}" is not before the language model: {", ".join(TOWERS)} are')
    before = {path for tower in TOWERS for path in found.get(tower, ())}
    lists = [path for path, _ in blocks(model) if path not in before]
    if not lists:
        raise CutRefused(f"the model has no list of blocks behind its {group}: name the module to cut after")
    return f"{lists[0]}.0"


def blocks(model: nn.Module) -> list[tuple[str, int]]:
    """Lists of blocks in the model, the one with most parameters first: the list's path, and how many are in it."""
    found = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) and len({type(one) for one in module}) == 1:
            size = sum(parameter.numel() for parameter in module.parameters())
            found.append((size, path, len(module)))
    found = [one for one in found if not any(one[1].startswith(f"{other[1]}.") for other in found)]
    return [(path, count) for _, path, count in sorted(found, key=lambda one: -one[0])]


_LISTS: Final = (nn.ModuleList, nn.ModuleDict)


def _blocks_told(model: nn.Module) -> str:
    """For the end of a message: names that there are."""
    told = [f"{path}.0 to {path}.{count - 1}" for path, count in blocks(model)[:MOST]]
    return f" Its blocks are {', '.join(told)}." if told else ""
