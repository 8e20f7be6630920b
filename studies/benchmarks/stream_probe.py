"""The edge of the row `stream`, in a process of its own, pinned to one core: stages alone, and a stream of requests.

    python -m studies.benchmarks.stream_probe HOST:PORT EDGE_CORE CLOUD_CORE ROUNDS [MAX_IN_FLIGHT]

prints JSON: per round nanoseconds of the head alone and of the tail alone (each on the core of its side, in this
process, without bytes in between), of a request by itself, and of a request in a stream. A stream is measured from one
answer to a later one, with as many requests under way at both: neither its beginning nor its end is in it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from edge_client import ConnectionOptions, EdgeClient
from edge_client.model_choice import ModelChoice
from studies.benchmarks.networks import image
from studies.benchmarks.processes import target

MODEL, CUT = "ResNet18", "stages.0.1.relu#2"
REQUESTS = 32
"""Requests in a round's stream; a quarter as many of each stage."""
SKIPPED = 40
"""Answers before a stream is looked at: until as many are under way as will be."""


def each_ns(function: Callable[[], Any], count: int) -> float:
    """The median of ``count`` calls."""
    found = []
    for _ in range(count):
        began = time.perf_counter_ns()
        function()
        found.append(time.perf_counter_ns() - began)
    return median(found)


def main(address: str, edge: int, cloud: int, rounds: int, most: int | None = None) -> dict[str, Any]:
    x = image()
    found: dict[str, list[float]] = {name: [] for name in ("head", "tail", "alone", "stream")}
    choice = ModelChoice(target(MODEL), device="cpu", threads=1)
    # no memory that both see: between two machines there is none
    connection = ConnectionOptions(max_in_flight=most, area_bytes=0)
    with EdgeClient(address, choice, split=CUT, connection=connection) as client:
        early = client.wrapped.forward(x, end=CUT)
        client.infer(x)
        rows: dict[str, list[float]] = {}
        left = threading.Event()
        for _ in range(rounds):
            found["head"].append(each_ns(lambda: client.wrapped.forward(x, end=CUT), REQUESTS // 4))
            os.sched_setaffinity(0, {cloud})  # of this thread, which computes the tail
            found["tail"].append(each_ns(lambda: client.wrapped.forward(early, start=CUT), REQUESTS // 4))
            os.sched_setaffinity(0, {edge})
            found["alone"].append(each_ns(lambda: client.infer(x), REQUESTS // 4))
            left.clear()
            answers = client.infer_many(iter(lambda: None if left.is_set() else x, None))
            for _ in range(SKIPPED):
                next(answers)
            began = time.perf_counter_ns()
            for _ in range(REQUESTS):
                for name, ns in next(answers).times.as_dict().items():
                    rows.setdefault(name, []).append(ns)
            found["stream"].append((time.perf_counter_ns() - began) / REQUESTS)
            left.set()
            for _ in answers:  # what is still under way
                pass
        sent = client.infer(x).bytes_up
    return {"ns": found, "where_ns": {name: median(all) for name, all in rows.items()}, "bytes_up": sent}


if __name__ == "__main__":
    os.sched_setaffinity(0, {int(sys.argv[2])})
    torch.set_num_threads(1)
    print(json.dumps(main(sys.argv[1], *map(int, sys.argv[2:]))))
