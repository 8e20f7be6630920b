"""``edge-client profile``: where this side's (and the server's) time, memory and energy go, layer by layer."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from edge_client.client import CONNECTION_ERRORS
from edge_client.commands import exits
from edge_client.commands.credentials import credentials_of
from edge_client.commands.loading import choice_of, find
from edge_client.commands.output import check_json_target, table, write_json
from edge_client.commands.server import chosen, running
from edge_client.model_choice import ModelChoice
from edge_client.screen.progress import progress
from edge_client.screen.text import milliseconds, one_line, printable, size
from edge_client.settings import HOW
from edge_client.survey.probing import fetch_profile
from shared_hooks import WrappedModel
from shared_hooks.errors import SpecError
from shared_hooks.models import InputItem, ModelSpec
from shared_hooks.models.example import to_device
from shared_hooks.profiling.profile import LayerProfile, Profile
from shared_hooks.profiling.profile_file import check, from_json, to_json
from shared_hooks.profiling.profiler import ProfileOptions, profile_edge
from shared_hooks.profiling.quartiles import Quartiles

SLOWEST = 5
"""So many cuts are shown; the JSON has all."""
FILES_PER_KIND = 3
"""Input files measured of every suffix."""


def main(options: argparse.Namespace) -> int:
    """Measure, print tables, write JSON; status 3 where the server's profile could not be had."""

    server = None if options.side == "edge" else chosen(options)
    side = options.side or ("both" if server else "edge")
    if side != "edge" and not server:
        raise SpecError(f"--side {side}: the cloud's side is measured by a server: {HOW}")
    check_json_target(options.json)
    with running(server, choice_of(options)) as address:
        return _measure(options, side, address)


def _measure(options: argparse.Namespace, side: str, server: str | None) -> int:
    how = ProfileOptions(options.warmup, options.repetitions, options.seconds, options.codec)
    choice = choice_of(options)
    spec = choice.spec()
    items = find(options.input) if options.input else []
    profiles: list[Profile] = []
    status = exits.OK
    if side != "cloud":
        profiles.append(_edge(choice.with_spec(spec), spec, items, how, not options.no_progress))
    if side != "edge":
        try:
            assert server is not None
            cloud = from_json(_fetch(options, server, spec, how), "cloud", server)
            if profiles:
                for warning in check(cloud, profiles[0].model):
                    print(f"edge-client: warning: {one_line(warning)}", file=sys.stderr)
            profiles.append(cloud)
        except CONNECTION_ERRORS as error:
            if options.debug or not profiles:
                raise
            print(f"edge-client: error: {one_line(f'{type(error).__name__}: {error}')}", file=sys.stderr)
            status = exits.CONNECTION
    _say_once(profiles)
    if options.json != "-":
        print("\n\n".join(as_text(profile, _width()) for profile in profiles), flush=True)
    if options.json:
        both = {profile.side: to_json(profile) for profile in profiles}
        write_json(both if len(both) > 1 else to_json(profiles[0]), options.json, options.stdout)
    return status


def _edge(choice: ModelChoice, spec: ModelSpec, items: Sequence[InputItem], how: ProfileOptions, show: bool) -> Profile:

    device = choice.set_up()
    # The example where there is one: it is what the server measures, too.
    inputs = spec.example(device) or (spec.preprocess(items[0]) if items else None)
    if inputs is None:
        raise SpecError(f"{spec.origin}: the spec has no example input to profile; give one with --input")
    args, kwargs = to_device(inputs[0], device), to_device(inputs[1], device)
    with (
        WrappedModel(spec.load_model(device), depth=choice.depth) as wrapped,
        progress("profiling", how.repetitions + how.warmup + 2, show) as advance,
    ):
        return profile_edge(
            wrapped,
            spec.model_id,
            args,
            kwargs,
            how,
            files=_some([item.path for item in items]),
            prepare=spec.preprocess,
            on_progress=lambda done, total, what: advance(what),
        )


def _fetch(options: argparse.Namespace, server: str, spec: ModelSpec, how: ProfileOptions) -> object:

    with progress("server's profile", None, not options.no_progress) as advance:
        return fetch_profile(
            server,
            spec.model_id,
            how.warmup,
            how.repetitions,
            how.seconds,
            lambda done, total, what: advance(what),
            credentials=credentials_of(options),
        )


def _some(paths: Sequence[Path]) -> list[Path]:
    """The first `FILES_PER_KIND` of every suffix."""
    kept: dict[str, list[Path]] = {}
    for path in paths:
        kept.setdefault(path.suffix.lower(), []).append(path)
    return [path for same in kept.values() for path in same[:FILES_PER_KIND]]


def _say_once(profiles: Sequence[Profile]) -> None:
    for profile in profiles:
        if profile.whole_energy.value is None:
            print(f"edge-client: {profile.side}: {one_line(profile.whole_energy.note)}", file=sys.stderr)


def _width() -> int | None:
    """Columns of the terminal that is written to; None for a file or a pipe, where lines may be as long as they are."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def as_text(profile: Profile, width: int | None = None) -> str:
    """Machine, layers, what lies outside them, the whole, and the slowest cuts; no wider than ``width`` where that can
    be done by leaving columns out.
    """
    machine, settings = profile.machine, profile.settings
    quota = machine.get("cpu_quota")
    limit = f", {quota:g} processors by quota" if isinstance(quota, (int, float)) else ""
    about = [
        f"{profile.model.model_id} on the {profile.side}: {machine.get('name')}, {machine.get('cpu') or '?'}, "
        f"{settings.get('device')}, {settings.get('threads')} threads{limit}",
        f"{profile.whole_ns.n} whole forwards; median [first quartile, third quartile], ms",
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

    columns: list[tuple[str, bool, Callable[[LayerProfile], str], str, str]] = [
        ("id", True, lambda layer: str(layer.layer_id), "", ""),
        ("name", False, lambda layer: printable(layer.name), "outside layers", "whole"),
        ("type", False, lambda layer: printable(layer.layer_type), "", ""),
        ("time", True, lambda layer: _spread(layer.inference_ns), _spread(outside), _spread(profile.whole_ns)),
        ("share", True, lambda layer: share(layer.inference_ns.median), share(outside.median), share(whole)),
        ("CPU", True, lambda layer: milliseconds(layer.cpu_ns.median) if layer.cpu_ns else "-", "", ""),
        ("peak", True, lambda layer: _bytes(layer.memory_peak.value), "", _bytes(profile.whole_memory_peak.value)),
        ("energy", True, lambda layer: _joules(layer.energy.value), "", _joules(profile.whole_energy.value)),
        ("crosses", True, lambda layer: size(layer.frontier_bytes) if layer.can_split else "no cut", "", ""),
    ]
    if all(layer.energy.value is None for layer in profile.layers) and profile.whole_energy.value is None:
        columns = [column for column in columns if column[0] != "energy"]
    if all(layer.cpu_ns is None for layer in profile.layers):
        columns = [column for column in columns if column[0] != "CPU"]
    while True:
        rows = [[cell(layer) for _, _, cell, _, _ in columns] for layer in profile.layers]
        rows += [[column[3] for column in columns], [column[4] for column in columns]]
        right = [number for number, column in enumerate(columns) if column[1]]
        text = table([column[0] for column in columns], rows, right)
        spare = next((name for name in ("crosses", "type", "peak", "CPU") if name in [c[0] for c in columns]), None)
        if width is None or spare is None or max(map(len, text.splitlines())) <= width:
            return text
        columns = [column for column in columns if column[0] != spare]


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
    return text + (f"\n{estimated} cuts are estimated (~), not measured: give more --seconds" if estimated else "")


def _spread(value: Quartiles) -> str:
    return f"{milliseconds(value.median)} [{milliseconds(value.q1)}, {milliseconds(value.q3)}]"


def _bytes(value: float | None) -> str:
    return "-" if value is None else size(round(value))


def _joules(value: float | None) -> str:
    return "-" if value is None else f"{value * 1000:.3g} mJ"
