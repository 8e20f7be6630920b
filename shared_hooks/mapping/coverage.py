"""What the static tree and the dynamic run have in common, and what only one of them has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared_hooks.mapping.joined import HierarchyMap


@dataclass(frozen=True)
class Coverage:
    """``both``: modules that ran. ``unused``, ``holders``: only static; modules that never ran (unused, or only their
    parameters are read), and those that cannot run. ``functional``: only dynamic; operations between modules, how many
    of each name. ``repeated``: modules that ran several times. ``from_elsewhere``: calls made while the module that
    holds the called one was not running, which is where tags and the order of calls part.
    """

    modules: int
    both: tuple[str, ...]
    unused: tuple[str, ...]
    holders: tuple[str, ...]
    functional: Mapping[str, int]
    repeated: Mapping[str, int]
    from_elsewhere: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "modules": self.modules,
            "both": len(self.both),
            "only_static": {"unused": list(self.unused), "holders": list(self.holders)},
            "only_dynamic": {"operations": sum(self.functional.values()), "by_name": dict(self.functional)},
            "repeated_calls": dict(self.repeated),
            "parents_before_children": not self.from_elsewhere,
            "called_from_elsewhere": list(self.from_elsewhere),
        }


def coverage_of(known: HierarchyMap) -> Coverage:
    """The report on a map."""
    silent = [entry for entry in known.modules if not entry.calls]
    functional = Counter(entry.name for entry in known.operations)
    return Coverage(
        len(known.modules),
        tuple(entry.path for entry in known.modules if entry.calls),
        tuple(entry.path for entry in silent if not entry.holder),
        tuple(entry.path for entry in silent if entry.holder),
        dict(functional.most_common()),
        {entry.path: entry.calls for entry in known.modules if entry.calls > 1},
        tuple(entry.name for entry in known.calls if not _holder_runs(known, entry.name)),
    )


def _holder_runs(known: HierarchyMap, call: str) -> bool:
    """Whether the nearest module above that can be called is among the calls that are running."""
    entry = known.by_call[call]
    above = known.by_path[entry.path].parent
    while above is not None and not known.by_path[above].calls and known.by_path[above].holder:
        above = known.by_path[above].parent
    return above is None or any(running.path == above for running in known.chain(call)[:-1])
