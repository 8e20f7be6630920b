"""`--split auto` in virtual time, beside an oracle that knows the link: model shapes, buckets, with and without codecs.

python -m studies.controller
"""

from __future__ import annotations

import argparse
import statistics
from typing import Final

from edge_client.adaptive.controller import SplitController
from edge_client.planning.codecs import AUTO, Codecs
from tests.edge_client.planning.made import SHAPES, losses, profile, with_codecs
from tests.edge_client.planning.world import SECONDS, TRACE, Phase, World, controlled, oracle

BUCKETS: Final = (16 << 10, 32 << 10, 128 << 10)
PERIOD_MS: Final = 100
MAX_LOSS: Final = 0.01
WAYS: Final = ("one codec", "without loss", "with a loss")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.controller", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="of each world (default: 3)")
    options = parser.parse_args()
    links = ", ".join("gone" if mbit is None else f"{mbit:g}" for mbit in TRACE)
    print(f"links of {SECONDS:g} s each (Mbit/s): {links}; a request every {PERIOD_MS} ms; latency / the oracle's\n")
    print("| codecs | shape | " + " | ".join(f"{bucket >> 10} KiB" for bucket in BUCKETS) + " | probes |")
    print("|---|---|" + "---|" * len(BUCKETS) + "---|")
    all_means: list[float] = []
    for way in WAYS:
        for shape in SHAPES:
            means, probes = [], 0.0
            for bucket in BUCKETS:
                found = [measured(way, shape, bucket, seed) for seed in range(options.seeds)]
                means.append(statistics.fmean(ratio for ratio, _ in found))
                probes += statistics.fmean(count for _, count in found) / len(BUCKETS)
            all_means += means
            print(
                f"| {way} | {shape} | " + " | ".join(f"{mean:.2f}" for mean in means) + f" | {probes:.0f} |", flush=True
            )
    print(f"\nmean {statistics.fmean(all_means):.3f}, worst {max(all_means):.2f}")
    return 0


def measured(way: str, shape: str, bucket: int, seed: int) -> tuple[float, int]:
    """Mean latency over the oracle's, and how many probes there were."""
    layers = SHAPES[shape]
    edge, cloud, codecs = profile("edge", layers), profile("cloud", layers), None
    if way != WAYS[0]:
        edge, cloud = with_codecs(edge), with_codecs(cloud)
        codecs = Codecs.of(AUTO, *((losses(len(layers)), MAX_LOSS) if way == WAYS[2] else ()))
    phases = [Phase(SECONDS, mbit) for mbit in TRACE]
    mine, ideal = (World(edge, cloud, phases, seed=seed, codecs=codecs, burst=bucket) for _ in range(2))
    run = controlled(mine, SplitController(mine.edge, mine.cloud, mine.link(0), codecs=codecs), PERIOD_MS)
    return run.mean / oracle(ideal, PERIOD_MS).mean, run.probes


if __name__ == "__main__":
    raise SystemExit(main())
