"""Measure where a model's time, memory and energy go, by layer and by cut, here and on a server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from edge_client.core import CONNECTION_ERRORS
from edge_client.credentials import Credentials
from edge_client.options import ProfilingOptions
from edge_client.planning.codecs import AUTO, LossTable, chosen_from, named, table_of
from edge_client.probing import fetch_profile
from edge_client.process import local_server
from edge_client.screen import Column, Row, Tabular, counted, fitted, milliseconds, printable, size, table
from edge_client.screen import progress as bar
from edge_client.settings import OWN, how_named
from edge_client.survey import Say, measured_by_servers, with_books
from edge_client.tasks.subject import Model, Subject, address_of, subject_of
from edge_client.user_text import option
from shared_hooks.codecs.basis import Basis
from shared_hooks.errors import SpecError, near
from shared_hooks.modules import call_parts
from shared_hooks.options import takes
from shared_hooks.profiling.profile import LayerProfile, Profile, Quartiles, check, from_json, to_json
from shared_hooks.profiling.profiler import ProfileOptions, profile_edge

# A profile as text: machine, layers, the time outside them, the slowest cuts.
#
# A module that is called several times in a forward is one row, of all its calls; in the profile each call is a
# layer.

SLOWEST: Final = 5
"""Cuts shown; the JSON has all."""


def as_text(profile: Profile, width: int | None = None) -> str:
    """Format machine, layers, the rest of the time, the whole, and the slowest cuts. Columns are left out to fit
    ``width``.
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
    """Return the layers of each module, one per call, in the order of the first."""
    found: dict[str, list[LayerProfile]] = {}
    for layer in profile.layers:
        found.setdefault(_path(layer), []).append(layer)
    return list(found.values())


def _path(layer: LayerProfile) -> str:
    """Return the path of its module."""
    return call_parts(layer.name)[0]


def _calls(profile: Profile) -> bool:
    """Return whether a module is called more than once."""
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
    """Format the time of several calls: the sum of medians, which has no known quartiles."""
    return _spread(calls[0].inference_ns) if len(calls) == 1 else milliseconds(_sum(one.inference_ns for one in calls))


def _peak(calls: list[LayerProfile]) -> str:
    return _bytes(max((one.memory_peak.value for one in calls if one.memory_peak.value is not None), default=None))


def _energy(calls: list[LayerProfile]) -> str:
    known = [one.energy.value for one in calls if one.energy.value is not None]
    return _joules(sum(known) if len(known) == len(calls) else None)


def _sum(values: Iterable[Quartiles | None]) -> float:
    """Return the sum of medians."""
    return sum(value.median for value in values if value is not None)


def _spread(value: Quartiles) -> str:
    """Format the median, with its quartiles if there are several values."""
    if value.n < 2:
        return milliseconds(value.median)
    return f"{milliseconds(value.median)} [{milliseconds(value.q1)}, {milliseconds(value.q3)}]"


def _bytes(value: float | None) -> str:
    return "-" if value is None else size(round(value))


def _joules(value: float | None) -> str:
    return "-" if value is None else f"{value * 1000:.3g} mJ"


FILES_PER_KIND: Final = 3
"""Input files measured of every suffix."""


@dataclass(frozen=True, repr=False)
class Profiled(Tabular):
    """Result of `edge_client.profile`. A row is a layer on one side; times are medians in ns.

    ``edge`` and ``cloud``: the profiles (docs/profiles.md), None for a side that was not requested, or that failed with
    ``failure``. ``warnings``: what makes them less certain.
    """

    edge: Profile | None
    cloud: Profile | None
    warnings: Sequence[str] = ()
    failure: Exception | None = None

    shown = {  # noqa: RUF012
        "side": "side",
        "layer_id": "id",
        "name": "name",
        "layer_type": "type",
        "inference_ns": "ms",
        "share": "share",
        "memory_peak_bytes": "peak",
        "frontier_bytes": "crosses",
        "energy_j": "J",
    }

    drawn = "inference_ns"

    @property
    def profiles(self) -> list[Profile]:
        """The profiles of the sides that were measured."""
        return [one for one in (self.edge, self.cloud) if one is not None]

    def title(self) -> str:
        sides = ", ".join(f"{one.whole_ns.median / 1e6:.3f} ms on the {one.side}" for one in self.profiles)
        return f"{self.profiles[0].model.model_id}: a whole forward takes {sides}" if sides else "no profile"

    def rows(self) -> list[Row]:
        return [_row(profile, layer) for profile in self.profiles for layer in profile.layers]

    def slowest(self, side: Literal["edge", "cloud"] = "edge", count: int = 5) -> list[LayerProfile]:
        """Return the slowest layers of one side (each a call of a module), slowest first.

        Raises SpecError if the side has no profile.
        """
        if side not in ("edge", "cloud"):
            raise SpecError(f'side={side!r:.60}: must be "edge" or "cloud".{near(str(side), ("edge", "cloud"))}')
        profile = self.edge if side == "edge" else self.cloud
        if profile is None:
            raise SpecError(f"the {side}'s side was not measured")
        return sorted(profile.layers, key=lambda layer: -layer.inference_ns.median)[:count]

    def text(self, width: int | None = None) -> str:
        """Format the profiles as the command prints them. Columns are left out to fit into ``width``."""
        return "\n\n".join(as_text(profile, width) for profile in self.profiles)

    def as_dict(self) -> dict[str, Any]:
        """Return the file's JSON data: one profile, or both by side."""
        found: dict[str, Any] = {one.side: to_json(one) for one in self.profiles}
        return found if len(found) != 1 else to_json(self.profiles[0])


@takes(ProfilingOptions)
def profile(server: str | None, model: Model, inputs: Any = None, *, options: ProfilingOptions) -> Profiled:
    """Measure every layer and every cut of ``model`` on this machine and, with a server, there (docs/profiles.md).

        found = edge_client.profile("none", module, image)
        found.slowest()           # layers, the longest first
        found.to_pandas()         # one row a layer and side

    ``server``: HOST:PORT; "own": started on this machine; "none": this side alone; None: the default (ISTHMUS_SERVER,
    settings), else none. ``model`` and ``inputs``: as for `plan`; for files, reading the first three of each suffix is
    timed, too. ``side``: both with a server, else the edge's. ``warmup``, ``repetitions`` and ``seconds`` bound the
    work of each side. ``codec="auto"``: with every codec, for `plan` to choose from; "basis" is one of them where
    ``calibration`` (`edge_client.calibrate`) has books, at the cuts that have them. ``failures="return"``: if the
    server cannot be reached, `Profiled.cloud` is None, and the edge's profile is returned.

    Raises as `plan` does.
    """
    if options.side not in (None, "edge", "cloud", "both"):
        raise SpecError(f'side={options.side!r}: must be "edge", "cloud", "both" or None')
    address = None if options.side == "edge" else address_of(server)
    which = options.side or ("both" if address else "edge")
    if which != "edge" and not address:
        raise SpecError(f"{option('side', which)}: the cloud's side is measured by a server: {how_named()}")
    codec = named(options.codec)
    table = table_of(codec, options.calibration)
    every = chosen_from(table) if codec == AUTO else ()
    books = {} if table is None else table.books
    how = ProfileOptions(
        options.warmup,
        options.repetitions,
        options.seconds,
        "raw" if every else codec,
        codecs=every or (codec,),
        books=books,
    )
    subject = subject_of(model, inputs, address, options.credentials)
    warnings: list[str] = []

    def warn(text: str) -> None:
        warnings.append(text)
        options.say(f"warning: {text}")

    edge = _edge(subject, how, table, options.progress) if which != "cloud" else None
    for text in edge.warnings if edge is not None else ():
        warn(f"edge: {text}")
    if which == "edge":
        return Profiled(edge, None, warnings)
    assert address is not None
    try:
        if address == OWN:
            options.say("starting a server on this machine")
            with local_server(subject.choice) as own:
                cloud = _cloud(own, subject, how, table, None, options.progress, warn)
        else:
            cloud = _cloud(address, subject, how, table, options.credentials, options.progress, warn)
        if edge is not None:
            for text in check(cloud, edge.model):
                warn(text)
    except CONNECTION_ERRORS as error:
        if options.failures == "raise" or edge is None:
            raise
        return Profiled(edge, None, warnings, error)
    return Profiled(edge, cloud, warnings)


def _edge(subject: Subject, how: ProfileOptions, table: LossTable | None, show: bool) -> Profile:
    loaded = subject.load()
    with loaded.wrapped as wrapped, bar("profiling", None, show) as advance:
        if table is not None:
            table.check(wrapped.weights_hash(), wrapped.structure_digest())
        return profile_edge(
            wrapped,
            loaded.spec.model_id,
            loaded.args,
            loaded.kwargs,
            replace(how, depth=loaded.choice.depth),
            files=_some([one.item.path for one in subject.inputs if one.item is not None]),
            prepare=loaded.spec.preprocess,
            on_progress=counted(advance, how.seconds),
        )


def _cloud(
    server: str,
    subject: Subject,
    how: ProfileOptions,
    table: LossTable | None,
    credentials: Credentials | None,
    show: bool,
    warn: Say,
) -> Profile:
    model_id = subject.spec.model_id
    with bar("server's profile", None, show) as advance:
        data = fetch_profile(
            server,
            model_id,
            how.warmup,
            how.repetitions,
            how.seconds,
            counted(advance, how.seconds),
            codecs=measured_by_servers(how.codecs),
            credentials=credentials,
        )
        found = from_json(data, "cloud", server)
        if table is None or Basis.name not in how.codecs:
            return found
        table.check(found.model.weights_hash, found.model.structure_digest)
        loaded = subject.load()
        with loaded.wrapped:
            return with_books(
                found,
                loaded,
                table.books,
                server,
                warn,
                counted(advance, how.seconds),
                seconds=how.seconds,
                credentials=credentials,
            )


def _some(paths: Sequence[Path]) -> list[Path]:
    """Return the first `FILES_PER_KIND` of every suffix."""
    kept: dict[str, list[Path]] = {}
    for path in paths:
        kept.setdefault(path.suffix.lower(), []).append(path)
    return [path for same in kept.values() for path in same[:FILES_PER_KIND]]


def _row(profile: Profile, layer: LayerProfile) -> Row:
    whole, features = profile.whole_ns.median, layer.features
    return {
        "side": profile.side,
        "layer_id": layer.layer_id,
        "name": layer.name,
        "layer_type": layer.layer_type,
        "inference_ns": layer.inference_ns.median,
        "inference_q1_ns": layer.inference_ns.q1,
        "inference_q3_ns": layer.inference_ns.q3,
        "share": layer.inference_ns.median / whole if whole else None,
        "cpu_ns": layer.cpu_ns.median if layer.cpu_ns else None,
        "memory_peak_bytes": layer.memory_peak.value,
        "energy_j": layer.energy.value,
        "energy_status": layer.energy.status,
        "output_bytes": layer.output_bytes,
        "frontier_bytes": layer.frontier_bytes if layer.can_split else None,
        "can_split": layer.can_split,
        "parameters": features.get("parameters"),
        "macs": features.get("macs"),
    }
