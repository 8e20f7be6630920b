"""``edge-client compare`` of two files of ``edge-client bench --json``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Final

from edge_client.benching.load import CONFIDENCE
from edge_client.benching.results import IN_TIME, compare, differences, is_bench, read
from edge_client.commands import common
from edge_client.commands.report import check_json_target, table, write_json
from edge_client.screen.text import one_line, printable
from shared_hooks.errors import SpecError

OF_SWEEPS: Final = ("report", "stages")


def main(options: argparse.Namespace) -> int:
    """Print what differs (and JSON); the exit status is 0 whatever it is."""
    for file in (options.a, options.b):
        if not is_bench(file):
            raise SpecError(f"{file}: is no file of bench --json, and the other one is")
    for name in OF_SWEEPS:
        if getattr(options, name):
            raise SpecError(f"--{name} is of two sweeps; these are two benches")
    check_json_target(options.json)
    a, b = read(options.a), read(options.b)
    known = {
        "a": options.a,
        "b": options.b,
        "confidence": CONFIDENCE,
        "differences": differences(a, b),
        "knee": [a["knee"], b["knee"]],
        "compared": compare(a, b),
    }
    if options.json != "-":
        print(text(known))
    if options.json:
        write_json(known, options.json, options.stdout)
    return common.OK


def text(known: Mapping[str, Any]) -> str:
    """The table, what else differs, and how sure all this is."""
    lines = [f"A  {printable(known['a'])}", f"B  {printable(known['b'])}"]
    lines += [f"differs: {one_line(line)}" for line in known["differences"]]
    if not known["compared"]:
        return "\n".join([*lines, "", "no rate is in both"])
    rows = []
    for one in known["compared"]:
        values = [_shown(one["figure"], one[key]) for key in ("a", "b")]
        ratio = "-" if one["ratio"] is None else f"{one['ratio']:.3f}"
        interval = "" if one["low"] is None else f"{one['low']:.2f} to {one['high']:.2f}"
        name = one["figure"] if one["figure"] == IN_TIME else f"{one['figure']} ms"
        rows.append([f"{one['rate']:g}", name, *values, ratio, interval, one["verdict"]])
    headers = ["rate/s", "figure", "A", "B", "B / A", "interval", "B is"]
    lines += ["", table(headers, rows, right=(0, 2, 3, 4)), ""]
    knees = ["none" if one is None else f"{one:g}/s" for one in known["knee"]]
    lines.append(f"knee: A {knees[0]}, B {knees[1]}")
    lines.append(f"the intervals hold together with {known['confidence']:.0%} confidence, and know each")
    lines.append("run's own noise, not what lies between two runs")
    return "\n".join(lines)


def _shown(figure: str, value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}" if figure == IN_TIME else f"{value / 1e6:.1f}"
