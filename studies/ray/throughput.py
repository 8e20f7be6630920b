"""As many requests as get through, from clients that each wait for the answer before they ask again, two at a time."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch

from edge_client import EdgeClient, ModelChoice
from studies.ray.model import CUT, inputs

CLIENTS = 24
IN_FLIGHT = 2
BYTES = 4 << 10


def measure(address: str, model: Path, seconds: float) -> dict[str, Any]:
    """Answers a second, of all clients together, after a warm-up."""
    counts, wrong, lost = [0] * CLIENTS, [0], list[str]()
    counting, over = threading.Event(), threading.Event()
    x = inputs(BYTES)
    wanted = torch.relu(x) * 2

    def ask(number: int, client: EdgeClient) -> None:
        while not over.is_set():
            try:
                answer = client.infer(x)
            except Exception as error:
                lost.append(f"{type(error).__name__}: {error}")
                continue
            wrong[0] += not torch.equal(answer.output, wanted)
            counts[number] += counting.is_set()

    choice = ModelChoice(str(model), device="cpu", threads=1)
    clients = [EdgeClient(address, choice, CUT, metrics=False, deadline=120) for _ in range(CLIENTS)]
    threads = [
        threading.Thread(target=ask, args=(number, client))
        for number, client in enumerate(clients)
        for _ in range(IN_FLIGHT)
    ]
    try:
        for thread in threads:
            thread.start()
        time.sleep(3)
        counting.set()
        began = time.monotonic()
        time.sleep(seconds)
        counting.clear()
        took = time.monotonic() - began
        over.set()
        for thread in threads:
            thread.join()
    finally:
        over.set()
        for client in clients:
            client.close()
    return {"answers_per_second": round(sum(counts) / took, 2), "lost": len(lost), "wrong": wrong[0], "why": lost[:3]}
