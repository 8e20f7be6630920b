"""``make ray``: what Ray Serve costs, what replicas give, what a death takes. On loopback; needs the extra ``ray``.

The exit status is 0 if nothing was lost or wrong, service was back within 10 s, and 4 replicas gave 3.5 times as
much as one process with one worker.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from studies.chaos.model import NAME as CHAOS
from studies.chaos.model import spec as chaos_spec
from studies.chaos.served import ROOT, _free_port
from studies.ray import killed, latency, throughput
from studies.ray.cluster import nodes, server
from studies.ray.model import NAME, spec
from studies.ray.table import table

CASES = ("latency", "throughput", "killed")
REPLICAS = (1, 2, 4)
NAP_SECONDS = 0.1
BACK_SECONDS = 10.0
GAIN = 3.5


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m studies.ray", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--requests", type=int, default=500, help="of each size, for latency")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each throughput")
    parser.add_argument("--times", type=int, default=3, help="that each thing dies")
    parser.add_argument("--faults", nargs="+", choices=killed.FAULTS, default=list(killed.FAULTS), metavar="FAULT")
    text = "where something dies; with several, there are two fronts"
    parser.add_argument("--replicas", nargs="+", type=int, default=[3, 1], metavar="N", help=text)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave everything there")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python -m studies.ray", *sys.argv[1:]]),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg(),
        "nap_seconds": NAP_SECONDS,
    }
    with tempfile.TemporaryDirectory(prefix="isthmus-ray-") as kept:
        folder = options.keep or Path(kept)
        folder.mkdir(parents=True, exist_ok=True)
        for case in options.cases:
            result[case] = globals()[f"_{case}"](folder, options)
    print(table(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if _good(result) else 1


def _good(result: dict[str, Any]) -> bool:
    rows = [*result.get("throughput", []), *result.get("killed", [])]
    return (
        not any(row["lost"] or row["wrong"] for row in rows)
        and all(row["without_service_max"] <= BACK_SECONDS for row in result.get("killed", []))
        and all(row["times_one"] >= GAIN for row in result.get("throughput", [])[-1:])
    )


def _latency(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    model = folder / "latency.toml"
    model.write_text(spec(0.0), encoding="utf-8")
    words = ["--model", f"{NAME}={model}", "--log-level", "warning"]
    with nodes(1) as there, server(folder, words) as plain, server(folder, words, there.address) as front:
        addresses = {"plain": plain.address, "ray": front.address}
        rows = latency.measure(addresses, model, options.requests)
    with server(folder, words) as plain, _proxy(folder, model) as address:
        again = latency.measure({"plain": plain.address, "proxy": address}, model, options.requests)
    for row, other in zip(rows, again, strict=True):
        row |= {"proxy": other["proxy"], "plain_beside_proxy": other["plain"]}
    return rows


@contextmanager
def _proxy(folder: Path, model: Path) -> Iterator[str]:
    port = _free_port()
    command = [sys.executable, "-u", "-m", "studies.ray.proxy", f"{NAME}={model}", str(port)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_SERVE_LOG_TO_STDERR": "0"}
    out = folder / "proxy.out"
    with out.open("wb") as stdout, (folder / "proxy.log").open("wb") as stderr:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, cwd=ROOT, env=env)
    try:
        limit = time.monotonic() + 300
        while b"listening on" not in out.read_bytes():
            if process.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"the proxy did not start; see {folder / 'proxy.log'}")
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        process.communicate(timeout=120)


def _throughput(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    model = folder / "throughput.toml"
    model.write_text(spec(NAP_SECONDS), encoding="utf-8")
    words = ["--model", f"{NAME}={model}", "--log-level", "warning"]
    with server(folder, words) as plain:
        rows = [{"server": "one process, one worker", **throughput.measure(plain.address, model, options.seconds)}]
    for count in REPLICAS:
        with nodes(2) as there, server(folder, [*words, "--replicas", str(count)], there.address) as front:
            found = throughput.measure(front.address, model, options.seconds)
        rows.append({"server": f"{count} replica{'s' * (count > 1)}", **found})
    for row in rows:
        row["times_one"] = round(row["answers_per_second"] / rows[0]["answers_per_second"], 2)
    return rows


def _killed(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for replicas in options.replicas:
        fronts = min(2, replicas)
        model = folder / f"killed-{replicas}.toml"
        model.write_text(chaos_spec(), encoding="utf-8")
        config = folder / f"server-{replicas}.toml"
        config.write_text(
            f"[models]\n{CHAOS} = {json.dumps(str(model))}\n[ray]\nreplicas = {replicas}\nfronts = {fronts}\n",
            encoding="utf-8",
        )
        # The head node runs Ray's own bookkeeping: one replica fits there, so that a worker node has something to lose.
        metrics = _free_port() + 500
        words = [str(config), "--metrics", str(metrics)]
        with nodes(3) as there, server(folder, words, there.address) as front:
            world = killed.World(there, front, model, random.Random(options.seed), replicas, fronts, metrics)
            faults = options.faults if replicas > 1 else [one for one in options.faults if "node" not in one]
            rows += killed.run(folder, world, options.times, faults)
    return rows


if __name__ == "__main__":
    sys.exit(main())
