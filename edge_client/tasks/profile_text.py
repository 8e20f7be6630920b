"""A profile as text: machine, layers, what lies outside them, the slowest cuts."""

from __future__ import annotations

from collections.abc import Callable
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
    about = [
        f"{profile.model.model_id} on the {profile.side}: {machine.get('name')}, {machine.get('cpu') or '?'}, "
        f"{settings.get('device')}, {_many(settings.get('threads'), 'thread')}{limit}",
        f"{_many(profile.whole_ns.n, 'whole forward')}; median [first quartile, third quartile], ms",
    ]
    parts = ["\n".join(map(printable, about)), _layers(profile, width), _cuts(profile, width)]
    if profile.files:
        rows = [[printable(file.name), size(file.nbytes), _spread(file.prepare_ns)] for file in profile.files]
        parts.append(table(["input file", "size", "to prepare"], rows, right=(1, 2)))
    return "\n\n".join(parts)


def _layers(profile: Profile, width: int | None) -> str:
    whole = profile.whole_ns.median
    outside = profile.outside_ns

    def share(ns: float) -> str:
        return f"{100 * ns / whole:.1f} %" if whole else "-"

    def column(head: str, cell: Callable[[LayerProfile], str], beyond: str = "", all_of_it: str = "") -> Column:
        return Column(head, [*map(cell, profile.layers), beyond, all_of_it], head not in ("name", "type"))

    columns = [
        column("id", lambda layer: str(layer.layer_id)),
        column("name", lambda layer: printable(layer.name), "outside layers", "whole"),
        column("type", lambda layer: printable(layer.layer_type)),
        column("time", lambda layer: _spread(layer.inference_ns), _spread(outside), _spread(profile.whole_ns)),
        column("share", lambda layer: share(layer.inference_ns.median), share(outside.median), share(whole)),
        column("CPU", lambda layer: milliseconds(layer.cpu_ns.median) if layer.cpu_ns else "-"),
        column("peak", lambda layer: _bytes(layer.memory_peak.value), "", _bytes(profile.whole_memory_peak.value)),
        column("energy", lambda layer: _joules(layer.energy.value), "", _joules(profile.whole_energy.value)),
        column("crosses", lambda layer: size(layer.frontier_bytes) if layer.can_split else "no cut"),
    ]
    unknown = {
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


def _spread(value: Quartiles) -> str:
    return f"{milliseconds(value.median)} [{milliseconds(value.q1)}, {milliseconds(value.q3)}]"


def _bytes(value: float | None) -> str:
    return "-" if value is None else size(round(value))


def _joules(value: float | None) -> str:
    return "-" if value is None else f"{value * 1000:.3g} mJ"
