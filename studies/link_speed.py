"""How well a probe tells a link's speed: many times on loopback and on shaped links, beside the truth.

python -m studies.link_speed --tries 20 --mbit 1,5,50          shaped links need root (namespaces, tc)
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from edge_client.model_choice import ModelChoice
from edge_client.planning.link import mbit
from edge_client.probing import probe
from edge_client.process import local_server
from studies.experiments.network import CLOUD, CLOUD_ADDRESS, EDGE, Network, inside

SIZES = (183, 4_221, 8_339, 16_410, 16_531, 24_734, 65_536)
"""What cuts of the shipped model send, and what `survey.probe_sizes` adds."""
ANSWERS = (162, 648)
SECONDS = 2.0
PAYLOAD = 1448 / 1514
"""The share of an Ethernet frame that is not headers: the true goodput is that share of a bucket's rate."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.link_speed", description=__doc__)
    parser.add_argument("--tries", type=int, default=10, help="probes of each link (default: 10)")
    parser.add_argument("--mbit", default="", help="shaped links, such as 1,5,50 (default: loopback alone)")
    parser.add_argument("--server", help=argparse.SUPPRESS)  # of the process inside the namespace
    options = parser.parse_args()
    if options.server:
        print(json.dumps(_probed(options.server, options.tries)))
        return 0
    print(
        f"{'link':<12} {'reported':>8} {'within 25 %':>12} {'interval holds':>15}  figures, lowest to highest; at least"
    )
    with local_server(ModelChoice("digits", threads=1)) as server:
        _show("loopback", None, _probed(server, options.tries))
    rates = [float(word) for word in options.mbit.split(",") if word]
    if rates:
        with Network() as network:
            network.rate(1000)
            with local_server(
                ModelChoice("digits", threads=1),
                listen=f"{CLOUD_ADDRESS}:0",
                arguments=["--insecure"],
                prefix=inside(CLOUD),
            ) as server:
                for rate in rates:
                    network.rate(rate)
                    words = [
                        sys.executable,
                        "-m",
                        "studies.link_speed",
                        "--server",
                        server,
                        "--tries",
                        str(options.tries),
                    ]
                    done = subprocess.run(inside(EDGE, *words), capture_output=True, text=True, check=True)
                    _show(f"{rate:g} Mbit/s", rate * 125_000 * PAYLOAD, json.loads(done.stdout))
    return 0


def _probed(server: str, tries: int) -> list[dict[str, Any]]:
    found = []
    for _ in range(tries):
        link, _ = probe(server, SIZES, ANSWERS, SECONDS)
        found.append(link.speed_up.as_dict())
        time.sleep(0.2)  # a bucket fills again
    return found


def _show(name: str, true: float | None, found: Sequence[dict[str, Any]]) -> None:
    reported = sorted(one["bytes_per_second"] for one in found if one["bytes_per_second"] is not None)
    least = [one["bytes_per_second_low"] for one in found if one["bytes_per_second"] is None]
    near = holds = "-"
    if true is not None:
        near = f"{sum(abs(value / true - 1) <= 0.25 for value in reported)} of {len(reported)}"
        within = sum(
            one["bytes_per_second_low"] <= true <= one["bytes_per_second_high"]
            for one in found
            if one["bytes_per_second"] is not None
        )
        holds = f"{within} of {len(reported)}"
    figures = f"{mbit(reported[0])} to {mbit(reported[-1])}" if reported else "-"
    bounds = ", ".join(mbit(value) for value in sorted(value or 0.0 for value in least))
    print(
        f"{name:<12} {f'{len(reported)} of {len(found)}':>8} {near:>12} {holds:>15}  {figures}; {bounds or '-'}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
