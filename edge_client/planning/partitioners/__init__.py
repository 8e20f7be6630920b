"""Partitioners by name: they pick the cut. Others plug in as entry points of the group "isthmus.partitioners".

partitioner  the interface, and what it is given
regression   layer times from the layers' features, by regression
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from edge_client.planning.objective import Decision as Decision
from edge_client.planning.objective import Objective
from edge_client.planning.partitioners.partitioner import ByObjective as ByObjective
from edge_client.planning.partitioners.partitioner import Cycle, Fixed
from edge_client.planning.partitioners.partitioner import Partitioner as Partitioner
from edge_client.planning.partitioners.partitioner import Situation as Situation
from edge_client.planning.partitioners.regression import Regression
from edge_client.spoken import option
from shared_hooks.errors import SpecError, near

GROUP: Final = "isthmus.partitioners"
BUILT_IN: Final[Mapping[str, Callable[[], Partitioner]]] = {
    "objective": ByObjective,
    "latency": lambda: ByObjective("the lowest predicted latency", Objective({"latency": 1.0})),
    "energy": lambda: ByObjective("the lowest predicted energy on the edge", Objective({"energy": 1.0})),
    "cycle": Cycle,
    "fixed": Fixed,
    "regression": Regression,
}


def partitioners() -> dict[str, str]:
    """Name -> what it does, without loading what others have plugged in."""
    known = {name: make().about for name, make in BUILT_IN.items()}
    return {**{name: f"plugged in: {one.value}" for name, one in _plugged().items()}, **known}


def find_partitioner(name: str) -> Partitioner:
    """A new one. An entry point is a class or a function without arguments; a built-in name cannot be taken by one.

    Raises SpecError for an unknown name and for one that cannot be loaded.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    plugged = _plugged().get(name)
    if plugged is None:
        raise SpecError(f"{option('partitioner', name)}: no such partitioner.{near(name, partitioners())}")
    try:
        made = plugged.load()()
    except Exception as error:
        raise SpecError(
            f"{option('partitioner', name)}: {plugged.value} raised {type(error).__name__}: {error}"
        ) from error
    if not callable(getattr(made, "decide", None)):
        raise SpecError(f"{option('partitioner', name)}: {plugged.value} has no decide(situation)")
    found: Partitioner = made
    return found


def _plugged() -> dict[str, EntryPoint]:
    return {one.name: one for one in entry_points(group=GROUP)}
