"""Many clients of one server at once; run in a process of its own by `batching`.

``python -m studies.benchmarks.batching_clients ADDRESS NETWORK CUT ROUNDS`` prints JSON: seconds of a round in which
each client asks `REQUESTS` times, one after the other, by way of asking. Each client has a stream of its own, and sends
the frontier of one image, computed before, so that heads take no processor from the server.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any

import torch

from edge_client import EdgeClient
from edge_client.model_choice import ModelChoice
from studies.benchmarks.networks import image
from studies.benchmarks.processes import target

CLIENTS = 16
REQUESTS = 4
WAYS = {"exact": True, "together": False}


class Replayed:
    """In place of a client's model: its head has run."""

    def __init__(self, client: EdgeClient, cut: str) -> None:
        model: Any = client._edge_model
        run, head = model.head, None

        def replay(call: Any, cut: Any, stamps: Any, *more: Any) -> Any:
            nonlocal head
            if head is None:
                head = run(call, cut, stamps, *more)
            stamps.computed = stamps.packed = time.perf_counter_ns()
            return head

        model.head = replay
        self._client, self._image = client, image()

    def ask(self, exact: bool) -> list[int]:
        """How many were computed together, of each request."""
        return [self._client.infer(self._image, exact=exact).batch_size for _ in range(REQUESTS)]


def round_of(clients: list[Replayed], exact: bool) -> tuple[float, list[int]]:
    """Seconds, and the sizes of all requests."""
    sizes: list[int] = []
    barrier = threading.Barrier(len(clients) + 1)

    def work(client: Replayed) -> None:
        barrier.wait()
        sizes.extend(client.ask(exact))

    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    barrier.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began, sizes


def main() -> None:
    address, network, cut, rounds = sys.argv[1:]
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    batch_size: dict[str, list[int]] = {way: [] for way in WAYS}
    with ExitStack() as stack:
        clients = []
        first: EdgeClient | None = None
        for _ in range(CLIENTS):
            if first is None:
                choice = ModelChoice(target(network), device="cpu", threads=1, example="1,3,224,224")
            else:  # of the same weights, in the same memory
                choice = ModelChoice(first.wrapped.model, model_id=network, threads=1)
            client = stack.enter_context(EdgeClient(address, choice, cut, metrics=False))
            first = first or client
            clients.append(Replayed(client, cut))
        for _ in range(2):
            clients[0].ask(exact=False)  # the server finds out, and tries the sizes that come
        for turn in range(2 + int(rounds)):
            for way, exact in WAYS.items():
                found, met = round_of(clients, exact)
                if turn > 1:
                    seconds[way].append(found)
                    batch_size[way] += met
    print(json.dumps({"seconds": seconds, "batch_size": batch_size}))


if __name__ == "__main__":
    main()
