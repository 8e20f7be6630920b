"""``python -m studies.dashboard.cost [--rounds N]``: what looking on costs a request of the shipped model.

One client asks, without a server: with nobody looking, with a page that nobody has open, with one that is open, and
with a sink; in turns, so that a machine's moods meet all alike. Of each: the median request, and the processor's time
for one, all threads'.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator

import torch

from edge_client import EdgeClient
from edge_client.live import Dashboard, ToSinks
from shared_hooks.sinks import open_sink

REQUESTS = 100


def main() -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="python -m studies.dashboard.cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help=f"of {REQUESTS} requests (default: 10)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    value = torch.zeros(1, 1, 32, 32)
    ways: dict[str, Callable[[EdgeClient], contextlib.AbstractContextManager[object]]] = {
        "nobody looks": lambda client: contextlib.nullcontext(),
        "a page, not open": Dashboard,
        "a page, open": _opened,
        "a TensorBoard sink": _sunk,
    }
    wall: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    with EdgeClient(None, "digits", "edge-only") as client:
        for _ in range(REQUESTS):
            client.infer(value)
        for _ in range(options.rounds):
            for name, way in ways.items():
                with way(client):
                    time.sleep(0.5)  # what begins is no request's
                    before = time.process_time()
                    for _ in range(REQUESTS):
                        began = time.perf_counter()
                        client.infer(value)
                        wall[name].append(time.perf_counter() - began)
                    processor[name].append((time.process_time() - before) / REQUESTS)
    print(f"{'':20}  median ms  processor ms")
    for name in ways:
        print(
            f"{name:20}  {1e3 * statistics.median(wall[name]):9.3f}  {1e3 * statistics.median(processor[name]):12.3f}"
        )
    return 0


@contextlib.contextmanager
def _opened(client: EdgeClient) -> Iterator[None]:
    """Read in this process, so its reading counts, too."""
    with Dashboard(client) as page:
        reader = threading.Thread(target=lambda: urllib.request.urlopen(f"{page.url}events").read())
        reader.start()
        yield
    reader.join()


@contextlib.contextmanager
def _sunk(client: EdgeClient) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        hook = ToSinks(open_sink(f"tensorboard:{folder}"))
        client.lifecycle.register(hook)
        try:
            yield
        finally:
            client.lifecycle.remove(hook)
            hook.close()


if __name__ == "__main__":
    sys.exit(main())
