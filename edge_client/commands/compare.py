"""Implement ``edge-client compare``, for two sweeps or two benches."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from edge_client.benching import results as benches
from edge_client.benching.load import CONFIDENCE
from edge_client.commands import common
from edge_client.commands.common import check_json_target, write_json
from edge_client.commands.report import table
from edge_client.screen import milliseconds, one_line, printable
from edge_client.sweeping import settings
from edge_client.sweeping.compare import SUM, ComparedStage, as_dict, compare, read, render
from shared_hooks.errors import SpecError
from shared_hooks.files import write_text


def main(options: argparse.Namespace) -> int:
    """Print the differences (and JSON); the exit status is always 0."""
    if benches.is_bench(options.a) or benches.is_bench(options.b):
        return _of_benches(options)
    settings.check("polars", *(["jinja2"] if options.report else []))
    check_json_target(options.json)

    a, b = read(options.a), read(options.b)
    compared = compare(a, b)
    known = as_dict(a, b, compared)
    if options.json != "-":
        print(text(known, compared, options.stages))
    if options.json:
        write_json(known, options.json, options.stdout)
    if options.report:
        write_text(options.report, render(known), "--report")
    return common.OK


def text(known: dict[str, Any], compared: Sequence[ComparedStage], stages: bool) -> str:
    """Format the table, other differences, and the confidence."""

    lines = [f"A  {printable(known['a'])}", f"B  {printable(known['b'])}"]
    lines += [f"differs: {one_line(line)}" for line in known["differences"]]
    sums = [one for one in compared if one.stage == SUM]
    if not sums:
        return "\n".join([*lines, "", "no way to run a request is in both"])
    rows = []
    for one in compared if stages else sums:
        way = printable(one.way) + (" (local)" if one.mode == "local" and one.way != "edge-only" else "")
        interval = "" if one.low is None or one.high is None else f"{one.low:.2f} to {one.high:.2f}"
        ratio = "-" if one.ratio is None else f"{one.ratio:.3f}"
        stage = [one.stage] if stages else []
        rows.append([way, *stage, milliseconds(one.a_ns), milliseconds(one.b_ns), ratio, interval, one.verdict])
    headers = ["way", *(["stage"] if stages else []), "A ms", "B ms", "B / A", "interval", "B is"]
    shift = int(stages)
    lines += ["", table(headers, rows, right=(1 + shift, 2 + shift, 3 + shift)), ""]
    counts = Counter(one.verdict for one in sums)
    found = ", ".join(f"{verdict} at {count}" for verdict, count in counts.most_common())
    lines.append(f"of {len(sums)} ways: {found}")
    best = known["best"]
    if all(best):
        same = best[0] == best[1]
        lines.append(printable(f"best in both: {best[0]}" if same else f"best in A: {best[0]}; in B: {best[1]}"))
    if known["bytes"]:
        lines.append(f"bytes differ at {len(known['bytes'])} ways (--json lists them)")
    lines.append(
        f"medians; the intervals hold together for all {len(sums)} ways with {known['confidence']:.0%} confidence;"
        " they know each run's own noise, not what lies between two runs"
    )
    return "\n".join(lines)


OF_SWEEPS: Final = ("report", "stages")


def _of_benches(options: argparse.Namespace) -> int:
    for file in (options.a, options.b):
        if not benches.is_bench(file):
            raise SpecError(f"{file}: is no file of bench --json, and the other one is")
    for name in OF_SWEEPS:
        if getattr(options, name):
            raise SpecError(f"--{name} is of two sweeps; these are two benches")
    check_json_target(options.json)
    a, b = benches.read(options.a), benches.read(options.b)
    known = {
        "a": options.a,
        "b": options.b,
        "confidence": CONFIDENCE,
        "differences": benches.differences(a, b),
        "knee": [a["knee"], b["knee"]],
        "compared": benches.compare(a, b),
    }
    if options.json != "-":
        print(_text_of_benches(known))
    if options.json:
        write_json(known, options.json, options.stdout)
    return common.OK


def _text_of_benches(known: Mapping[str, Any]) -> str:
    """Format the table, other differences, and the confidence."""
    lines = [f"A  {printable(known['a'])}", f"B  {printable(known['b'])}"]
    lines += [f"differs: {one_line(line)}" for line in known["differences"]]
    if not known["compared"]:
        return "\n".join([*lines, "", "no rate is in both"])
    rows = []
    for one in known["compared"]:
        values = [_shown(one["figure"], one[key]) for key in ("a", "b")]
        ratio = "-" if one["ratio"] is None else f"{one['ratio']:.3f}"
        interval = "" if one["low"] is None else f"{one['low']:.2f} to {one['high']:.2f}"
        name = one["figure"] if one["figure"] == benches.IN_TIME else f"{one['figure']} ms"
        rows.append([f"{one['rate']:g}", name, *values, ratio, interval, one["verdict"]])
    headers = ["rate/s", "figure", "A", "B", "B / A", "interval", "B is"]
    lines += ["", table(headers, rows, right=(0, 2, 3, 4)), ""]
    knees = ["none" if one is None else f"{one:g}/s" for one in known["knee"]]
    lines.append(f"knee: A {knees[0]}, B {knees[1]}")
    lines.append(f"the intervals hold together with {known['confidence']:.0%} confidence, and know each")
    lines.append("run's own noise, not what lies between two runs")
    return "\n".join(lines)


def _shown(figure: str, value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}" if figure == benches.IN_TIME else f"{value / 1e6:.1f}"
