"""A profile as text: machine, layers, what lies outside them, the slowest cuts.

A module that is called several times in a forward is one row, of all its calls; in the profile each call is a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from edge_client.screen.table import Column, fitted, table
from edge_client.screen.text import milliseconds, printable, size
from edge_client.spoken import option
from shared_hooks.profiling.profile import LayerProfile, Profile
from shared_hooks.profiling.quartiles import Quartiles

SLOWEST: Final = 5
"""So many cuts are shown; the JSON has all."""


def as_text(profile: Profile, width: int | None = None) -> str:
    """Machine, layers, what lies outside them, the whole, and the slowest cuts; no wider than ``width`` where that can
    be done by leaving columns out.
    """
    machine, settings = profile.machine, profile.settings
    quota = machine.get("cpu_quota")
    limit = f", {quota:g} processors by quota" if isinstance(quota, (int, float)) else ""
    spread = "; median [first quartile, third quartile], ms" if profile.whole_ns.n > 1 else ", ms"
    together = "; calls of one module together, medians added" if _calls(profile) else ""
    about = [
        f"{profile.model.model_id} on the {profile.side}: {machine.get('name')}, {machine.get('cpu') or '?'}, "
        f"{settings.get('device')}, {_many(settings.get('threads'), 'thread')}{limit}",
        f"{_many(profile.whole_ns.n, 'whole forward')}{spread}{together}",
    ]
    parts = ["\n".join(map(printable, about)), _layers(profile, width), _cuts(profile, width)]
    if profile.files:
        rows = [[printable(file.name), size(file.nbytes), _spread(file.prepare_ns)] for file in profile.files]
        parts.append(table(["input file", "size", "to prepare"], rows, right=(1, 2)))
    return "\n\n".join(parts)


def _modules(profile: Profile) -> list[list[LayerProfile]]:
    """The layers of each module, one for each call, in the order of the first."""
    found: dict[str, list[LayerProfile]] = {}
    for layer in profile.layers:
        found.setdefault(_path(layer), []).append(layer)
    return list(found.values())


def _path(layer: LayerProfile) -> str:
    """Of its module."""
    return layer.name.partition("#")[0]


def _calls(profile: Profile) -> bool:
    """Whether a module is called more than once."""
    return len(_modules(profile)) < len(profile.layers)


def _layers(profile: Profile, width: int | None) -> str:
    whole = profile.whole_ns.median
    outside = profile.outside_ns

    def share(ns: float) -> str:
        return f"{100 * ns / whole:.1f} %" if whole else "-"

    modules = _modules(profile)

    def column(head: str, cell: Callable[[list[LayerProfile]], str], beyond: str = "", all_of_it: str = "") -> Column:
        return Column(head, [*map(cell, modules), beyond, all_of_it], head not in ("name", "type"))

    def time_of(calls: list[LayerProfile]) -> float:
        return _sum(one.inference_ns for one in calls)

    columns = [
        column("id", lambda calls: str(calls[0].layer_id)),
        column("name", lambda calls: printable(_path(calls[0])), "outside layers", "whole"),
        column("type", lambda calls: printable(calls[0].layer_type)),
        column("calls", lambda calls: str(len(calls))),
        column("time", _time, _spread(outside), _spread(profile.whole_ns)),
        column("share", lambda calls: share(time_of(calls)), share(outside.median), share(whole)),
        column("CPU", lambda calls: milliseconds(_sum(one.cpu_ns for one in calls)) if calls[0].cpu_ns else "-"),
        column("peak", _peak, "", _bytes(profile.whole_memory_peak.value)),
        column("energy", _energy, "", _joules(profile.whole_energy.value)),
        column("crosses", lambda calls: size(calls[0].frontier_bytes) if calls[0].can_split else "no cut"),
    ]
    unknown = {
        "calls": not _calls(profile),
        "energy": profile.whole_energy.value is None and all(layer.energy.value is None for layer in profile.layers),
        "CPU": all(layer.cpu_ns is None for layer in profile.layers),
    }
    known = [column for column in columns if not unknown.get(column.header)]
    return fitted(known, ("crosses", "type", "peak", "CPU"), width)


def _cuts(profile: Profile, width: int | None) -> str:
    if not profile.cuts:
        return "no cut can be made"
    stages = list(profile.cuts[0].stages)
    slowest = sorted(profile.cuts, key=lambda cut: -sum(stage.median for stage in cut.stages.values()))[:SLOWEST]
    estimated = sum(bool(cut.estimated) for cut in profile.cuts)

    def rows(cell: Callable[[Quartiles], str]) -> str:
        lines = [
            [
                printable(cut.name) + (" ~" if cut.estimated else ""),
                *(cell(cut.stages[stage]) for stage in stages),
                size(cut.wire_bytes),
                _bytes(cut.memory_peak.value),
            ]
            for cut in slowest
        ]
        headers = [f"slowest of {len(profile.cuts)} cuts", *stages, "request", "peak"]
        return table(headers, lines, right=range(1, len(headers)))

    text = rows(_spread)
    if width is not None and max(map(len, text.splitlines())) > width:
        text = rows(lambda stage: milliseconds(stage.median))
    more = f"\n{estimated} cuts are estimated (~), not measured: give more {option('seconds')}"
    return text + more if estimated else text


def _many(count: object, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count} {what}s"


def _time(calls: list[LayerProfile]) -> str:
    """Of several calls the sum of medians, whose quartiles nobody knows."""
    return _spread(calls[0].inference_ns) if len(calls) == 1 else milliseconds(_sum(one.inference_ns for one in calls))


def _peak(calls: list[LayerProfile]) -> str:
    return _bytes(max((one.memory_peak.value for one in calls if one.memory_peak.value is not None), default=None))


def _energy(calls: list[LayerProfile]) -> str:
    known = [one.energy.value for one in calls if one.energy.value is not None]
    return _joules(sum(known) if len(known) == len(calls) else None)


def _sum(values: Iterable[Quartiles | None]) -> float:
    """Of medians."""
    return sum(value.median for value in values if value is not None)


def _spread(value: Quartiles) -> str:
    """The median; with its quartiles where there are several values."""
    if value.n < 2:
        return milliseconds(value.median)
    return f"{milliseconds(value.median)} [{milliseconds(value.q1)}, {milliseconds(value.q3)}]"


def _bytes(value: float | None) -> str:
    return "-" if value is None else size(round(value))


def _joules(value: float | None) -> str:
    return "-" if value is None else f"{value * 1000:.3g} mJ"
