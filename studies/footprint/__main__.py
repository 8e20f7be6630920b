"""``make footprint``: what an edge and a server take."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from studies.footprint import heads, imports, installed, light, limits, starts

MIB = 2**20
SERVER = "cloud-server"
PARTS = ("imports", "starts", "installed", "heads", "limits", "light")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.footprint", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", default=PARTS, metavar="imports|starts|installed|heads|limits|light", help="(default: all)"
    )
    parser.add_argument(
        "--python", default=sys.executable, help="of imports: another one, such as 'chroot DIR env ... python3'"
    )
    parser.add_argument("--edge", action="store_true", help="of imports: no server's")
    parser.add_argument("--tries", type=int, default=5, help="processes for each figure (default: 5)")
    parser.add_argument("--side", type=int, default=64, help="of heads: of the picture, in pixels (default: 64)")
    parser.add_argument("--json", type=Path, help="where the result goes")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(unknown)}")
    reported: dict[str, Any] = {}
    if "imports" in options.parts:
        reported["imports"] = _imports(shlex.split(options.python), options.tries, SERVER if options.edge else "")
    if "starts" in options.parts:
        reported["starts"] = _starts(options.tries)
    if "installed" in options.parts:
        reported["installed"] = _installed()
    if "heads" in options.parts:
        reported["heads"] = _heads(options.side, options.tries)
    if "limits" in options.parts:
        reported["limits"] = _limits()
    if "light" in options.parts:
        reported["light"] = {**light.measured(options.tries), "speeds": light.speeds()}
        print(json.dumps(reported["light"], indent=1))
    if options.json:
        command = " ".join(["python -m studies.footprint", *map(shlex.quote, sys.argv[1:])])
        about = {"date": time.strftime("%Y-%m-%d"), "command": command, "machine": platform.machine()}
        options.json.write_text(json.dumps({**about, **reported}, indent=1) + "\n")
    return 0


def _imports(python: list[str], tries: int, without: str) -> dict[str, Any]:
    names = [name for name in imports.STATEMENTS if name != without]
    rows = imports.measured(python, tries, names)
    alone = rows[0]
    print(
        f"{'import':<16}"
        + "".join(f" {name:>8}" for name in ("seconds", "x torch", "cpu s", "x torch", "MiB", "x torch"))
        + "   beyond torch  modules"
    )
    for row in rows:
        figures = [(row.seconds, alone.seconds, 3), (row.cpu, alone.cpu, 3), (row.mib, alone.mib, 1)]
        text = " ".join(f"{value:8.{places}f} {value / of:8.2f}" for value, of, places in figures)
        print(f"{row.name:<16} {text}  {row.seconds - alone.seconds:11.3f} s  {row.modules}")
    files = {}
    for name in names[2:]:
        found = imports.by_file(python, name, max(1, tries - 2))
        files[name] = dict(found.most_common(20))
        print(f"\n{name}, once torch is there: {found.total() / 1000:.0f} ms in {len(found)} files; the dearest, in ms")
        print(", ".join(f"{module} {own / 1000:.1f}" for module, own in found.most_common(12)))
    return {"rows": [asdict(row) for row in rows], "files_us": files}


def _starts(tries: int) -> list[dict[str, Any]]:
    rows = starts.measured(tries)
    print(f"\n{'command':<32} {'seconds':>8} {'cpu s':>8}   at most {starts.WANTED_SECONDS} s are wanted")
    for row in rows:
        print(f"{row.command:<32} {row.seconds:8.3f} {row.cpu:8.3f}{'' if row.seconds <= 0.1 else '   above'}")
    return [asdict(row) for row in rows]


def _installed() -> dict[str, Any]:
    base, cloud, sweep, own = installed.sizes(), installed.sizes("cloud"), installed.sizes("sweep"), installed.own()
    print("\ninstalled, MiB")
    for name, found in (("edge: what isthmus needs", base), ("cloud adds", cloud), ("sweep adds", sweep), ("own", own)):
        shown = sorted(found.items(), key=lambda one: -one[1])
        print(f"{name:<24} {sum(found.values()) / MIB:8.1f}  ", end="")
        print(", ".join(f"{key} {size / MIB:.1f}" for key, size in shown if size > MIB / 10))
    return {"edge": base, "cloud": cloud, "sweep": sweep, "own": own}


def _heads(side: int, tries: int) -> list[dict[str, Any]]:
    rows = heads.measured(side, tries)
    print(f"\nresident after {heads.REQUESTS} requests of {side} x {side} pixels, MiB")
    names = ("all weights", "head's", "whole", "base", "only head", "beyond", "by head's", "peak whole", "peak only")
    print(f"{'cut':<16}" + "".join(f"{name:>12}" for name in names))
    for row in rows:
        figures = (row.weights, row.head, row.whole, row.base, row.only_head, row.only_head - row.base, row.ratio)
        print(f"{row.cut:<16}" + "".join(f"{value:12.2f}" for value in (*figures, row.peak_whole, row.peak_only_head)))
    return [{**asdict(row), "base": row.base, "ratio": row.ratio} for row in rows]


def _limits() -> list[dict[str, Any]]:
    try:
        rows = limits.measured()
    except limits.NoGroups as error:
        print(f"\nlimits: not measured: {error}")
        return []
    print(f"\n{'an edge with a bound':<26} {'bound MiB':>9} {'peak MiB':>9}")
    for row in rows:
        print(f"{row.what:<26} {row.bound_mib:9} {row.peak_mib:9.1f}  {row.trouble or 'exact'}")
    return [asdict(row) for row in rows]


if __name__ == "__main__":
    sys.exit(main())
