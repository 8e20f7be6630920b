"""``make chaos``: all faults in an order drawn from the seed, again and again, until so many requests were asked.

Every answer is compared bit for bit. The exit status is 0 if none was lost, wrong or computed twice unreported, and
nobody was without service for longer than the bound.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from studies.chaos.crowd import KINDS, Crowd
from studies.chaos.faults import FAULTS, WORKER, World
from studies.chaos.findings import (
    BOUND_SECONDS,
    DETECTION_SECONDS,
    Episode,
    computed_twice,
    refused_by_name,
    row,
    table,
)
from studies.chaos.model import spec
from studies.chaos.served import Served
from studies.experiments.relay import Relay

CALM_SECONDS = 1.0
"""After everybody was served again, and before the next fault."""


def main() -> int:
    """See the module."""
    options = _options()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="isthmus-chaos-") as kept:
        folder = options.keep or Path(kept)
        folder.mkdir(parents=True, exist_ok=True)
        result = run(options, folder)
    result["seconds"] = round(time.monotonic() - began)
    print(table(result["faults"]))
    print(
        f"{result['asked']:,} asked, {result['lost']} lost, {result['wrong']} wrong, {len(result['computed_twice'])} "
        f"computed twice unreported; longest without service {result['longest']} s (bound {BOUND_SECONDS:g} s)"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    good = not (result["lost"] or result["wrong"] or result["computed_twice"])
    return 0 if good and result["longest"] <= BOUND_SECONDS else 1


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All of it; what it came to."""
    draw = random.Random(options.seed)
    served = Served(folder, options.server_arguments.split())
    model = folder / "model.toml"
    model.write_text(spec(), encoding="utf-8")
    arguments = ["--pause", str(options.pause), "--patience", str(options.patience)]
    episodes: list[Episode] = []
    try:
        served.start()
        faults = [name for name in options.faults if name != WORKER or served.workers()]
        with Relay(served.address) as relay:
            crowd = Crowd(folder, "{}:{}".format(*relay.address), model, options.clients, arguments)
            try:
                crowd.all_served(0.0)
                world = World(served, relay, crowd, draw)
                limit = time.monotonic() + 60 * options.minutes
                names = list(faults)
                while names or (len(crowd.known) < options.requests and time.monotonic() < limit):
                    names = names or list(faults)
                    episodes.append(_one(names.pop(draw.randrange(len(names))), world))
                    if len(episodes) >= len(faults) and time.monotonic() > limit:
                        break
            finally:
                crowd.close()
    finally:
        served.close()
    known = crowd.known
    lost = [one for one in known if one["came"] not in ("ok", "wrong") and not refused_by_name(one, episodes)]
    rows = [row(name, [one for one in episodes if one.fault == name], known) for name in faults]
    longest = [value for one in rows for value in (one["fixed_max"], one["auto_max"]) if value is not None]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python -m studies.chaos", *sys.argv[1:]]),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "clients": list(options.clients),
        "server_starts": [round(seconds, 2) for seconds in served.starts],
        "detection_seconds": DETECTION_SECONDS,
        "bound_seconds": BOUND_SECONDS,
        "asked": len(known),
        "lost": len(lost),
        "why_lost": [
            {key: one.get(key) for key in ("client", "kind", "asked", "answered", "came", "why")} for one in lost
        ],
        "other_weights_heard_seconds": [round(seconds, 2) for seconds in world.reported],
        "wrong": sum(one["came"] == "wrong" for one in known),
        "computed_twice": computed_twice(served.computed, known),
        "longest": max(longest, default=None),
        "faults": rows,
    }


def _one(name: str, world: World) -> Episode:
    time.sleep(CALM_SECONDS + world.draw.uniform(0, 0.5))
    began = time.monotonic()
    healed = FAULTS[name](world)
    world.crowd.all_served(healed)
    time.sleep(CALM_SECONDS)
    over = time.monotonic()
    print(f"{name}: {over - healed - CALM_SECONDS:.2f} s until all were served", file=sys.stderr, flush=True)
    return Episode(name, began, healed, over)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m studies.chaos", description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after so many, whatever was asked by then")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--clients", nargs="+", default=KINDS, metavar="KIND", help=f"default {' '.join(KINDS)}")
    parser.add_argument("--pause", type=float, default=0.02, metavar="S", help="of a client, on average")
    parser.add_argument("--patience", type=float, default=120.0, metavar="S")
    parser.add_argument("--server-arguments", default="--workers 2", metavar="'...'", help="more of cloud-server's own")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave everything there")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
