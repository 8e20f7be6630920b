"""Partitioners by name: they pick the cut. Others are ``module:Class``, or entry points of "isthmus.partitioners".

partitioner  the interface, and what it is given
regression   layer times from the layers' features, by regression
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final

from edge_client.planning.objective import Decision as Decision
from edge_client.planning.objective import Objective
from edge_client.planning.partitioners.partitioner import ByObjective as ByObjective
from edge_client.planning.partitioners.partitioner import Cycle, Fixed
from edge_client.planning.partitioners.partitioner import Partitioner as Partitioner
from edge_client.planning.partitioners.partitioner import Situation as Situation
from edge_client.planning.partitioners.partitioner import chosen as chosen
from edge_client.planning.partitioners.regression import Regression
from edge_client.spoken import option
from shared_hooks.config import looks_like_target, raised, resolve
from shared_hooks.errors import IsthmusError, SpecError, near

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
    """A new one. What ``module:Class`` or an entry point names is called without arguments; ``module`` may be in the
    current folder. A built-in name cannot be taken by an entry point.

    Raises SpecError for an unknown name and for one that cannot be loaded; later, from ``decide``, for what one
    from outside raises, and for a decision that is none.
    """
    where = option("partitioner", name)
    if name in BUILT_IN:
        return BUILT_IN[name]()
    plugged = _plugged().get(name)
    if plugged is None and not looks_like_target(name):
        known = f"{', '.join(partitioners())}, and module:Class of your own"
        raise SpecError(f"{where}: no such partitioner; there are {known}.{near(name, partitioners())}")
    target = name if plugged is None else plugged.value
    try:
        made = resolve(name, Path.cwd(), where)() if plugged is None else plugged.load()()
    except SpecError:
        raise
    except Exception as error:
        raise SpecError(f"{where}: {target} raised {raised(error)}") from error
    if not callable(getattr(made, "decide", None)):
        raise SpecError(f"{where}: {target} has no decide(situation)")
    return _Foreign(made, target)


class _Foreign:
    """A partitioner from outside: what goes wrong in it is reported as its own."""

    def __init__(self, inner: Partitioner, target: str) -> None:
        self._inner, self._target = inner, target
        self.about = str(getattr(inner, "about", target))

    def decide(self, situation: Situation) -> Decision:
        try:
            decision: object = self._inner.decide(situation)
        except IsthmusError:
            raise
        except Exception as error:
            raise SpecError(f"the partitioner {self._target} raised {raised(error)}") from error
        if not isinstance(decision, Decision):
            what = f"a {type(decision).__name__}, and no Decision (edge_client.planning.objective.decide makes one)"
            raise SpecError(f"the partitioner {self._target} returned {what}")
        return decision


def _plugged() -> dict[str, EntryPoint]:
    return {one.name: one for one in entry_points(group=GROUP)}
