"""Whether the row "upload" is the time that the bytes took: on shaped links, beside bytes over rate.

    python -m studies.upload_times --mbit 1,10,100        root (namespaces, tc); about two minutes

The truth is what a token bucket lets through: bytes with their Ethernet headers, less the bucket's burst, over its
rate. A row is right where it is within 10 % of that, or where the interval of ``clock_error`` about it holds it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn

from edge_client import EdgeClient
from edge_client.model_choice import ModelChoice
from edge_client.process import local_server
from studies.experiments.network import (
    BURST_SECONDS,
    CLOUD,
    CLOUD_ADDRESS,
    EDGE,
    LEAST_BURST,
    Network,
    inside,
)

SECONDS = (0.3, 0.5, 0.8, 1.2, 2.0)
"""The five sizes of a link are what it carries in these times."""
PAYLOAD = 1448 / 1514
MODEL = "studies.upload_times:Total"


class Total(nn.Module):
    """Takes as much as there is and answers with one number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


def expected(nbytes: int, mbit: float) -> float:
    """Seconds from the first byte to the last one."""
    rate = mbit * 1e6 / 8
    burst = max(LEAST_BURST, round(rate * BURST_SECONDS))
    return max(0.0, (nbytes / PAYLOAD - burst) / rate)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.upload_times", description=__doc__)
    parser.add_argument("--mbit", default="1,10,100", help="rates of the link (default: 1,10,100)")
    parser.add_argument("--tries", type=int, default=5, help="requests of each size, beside a first one (default: 5)")
    parser.add_argument("--server", help=argparse.SUPPRESS)  # of the process inside the namespace
    options = parser.parse_args()
    rates = [float(word) for word in options.mbit.split(",")]
    if options.server:
        print(json.dumps(_asked(options.server, rates[0], options.tries)))
        return 0
    print(f"{'link':<12} {'bytes':>10} {'truth ms':>10} {'upload ms':>10} {'+- ms':>8} {'of truth':>9}  right")
    right = count = 0
    with Network() as network:
        network.rate(1000)
        choice = ModelChoice(MODEL, threads=1, example="1,1024")
        arguments = ["--insecure"]
        with local_server(choice, listen=f"{CLOUD_ADDRESS}:0", arguments=arguments, prefix=inside(CLOUD)) as server:
            for rate in rates:
                network.rate(rate)
                words = [sys.executable, "-m", "studies.upload_times", "--server", server, "--mbit", str(rate)]
                done = subprocess.run(
                    inside(EDGE, *words, "--tries", str(options.tries)), capture_output=True, text=True, check=True
                )
                for nbytes, upload, error in json.loads(done.stdout.splitlines()[-1]):
                    truth = 1e3 * expected(nbytes, rate)
                    good = abs(upload / truth - 1) <= 0.1 or abs(upload - truth) <= error
                    right, count = right + good, count + 1
                    print(
                        f"{f'{rate:g} Mbit/s':<12} {nbytes:>10,} {truth:>10.1f} {upload:>10.1f} {error:>8.2f} "
                        f"{upload / truth:>9.3f}  {'yes' if good else 'NO'}",
                        flush=True,
                    )
    print(f"{right} of {count}")
    return 0 if right == count else 1


def _asked(server: str, mbit: float, tries: int) -> list[Any]:
    """(bytes, median upload in ms, its clock error in ms) of each size."""
    found = []
    with EdgeClient(server, ModelChoice(MODEL, threads=1, example="1,1024"), split="cloud-only") as client:
        for seconds in SECONDS:
            x = torch.rand(1, int(seconds * mbit * 1e6 / 8 / 4))
            answers = []
            for number in range(tries + 1):
                time.sleep(0.2)  # the bucket fills again
                answer = client.infer(x)
                if number:
                    answers.append(answer)
            uploads = [one.times.upload / 1e6 for one in answers]
            errors = [(one.times.clock_error or 0) / 1e6 for one in answers]
            found.append((answers[0].bytes_up, statistics.median(uploads), statistics.median(errors)))
    return found


if __name__ == "__main__":
    sys.exit(main())
