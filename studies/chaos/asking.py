"""A client's process: asks all the time, and writes down what became of every request.

    python -m studies.chaos.asking HOST:PORT SPEC CUT FILE [--threads N] [--pause S] [--patience S] [--fallback]

``CUT`` is one of `model.CUTS`, "mixed" or "auto". Each line of the file is JSON: when it was asked and answered (by a
clock that all processes share, in seconds), what came ("ok", "wrong", or an error's name), how often it was sent, where
it was computed, and under which client and id. It ends with its standard input.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from edge_client import Answer, ConnectionOptions, EdgeClient, ModelChoice
from edge_client.adaptive import AutoClient
from edge_client.adaptive.controller import SplitController
from edge_client.survey import SurveySources, gather
from edge_client.user_input import LoadedModel
from shared_hooks import WrappedModel
from shared_hooks.models import load_spec
from studies.chaos.model import CUTS, inputs

KINDS = 16
"""Different inputs."""
DEADLINE = 240.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("server", "spec", "cut", "file"):
        parser.add_argument(name)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--patience", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fallback", action="store_true", help="answer on the edge what the server cannot")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with WrappedModel(load_spec(options.spec).load_model()) as local:
        wanted = [local.whole(inputs(number)) for number in range(KINDS)]
    more: dict[str, Any] = {"fallback": "edge"} if options.fallback else {}
    client = EdgeClient(
        options.server,
        ModelChoice(options.spec, device="cpu", threads=1),
        CUTS.get(options.cut, "narrow"),
        metrics=False,
        deadline=DEADLINE,
        connection=ConnectionOptions(patience=options.patience),
        **more,
    )
    file = os.open(options.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    over = threading.Event()
    with client:
        asker: EdgeClient | AutoClient = client if options.cut != "auto" else _auto(client, options.server)
        threads = [
            threading.Thread(target=_ask, args=(asker, client, options, number, wanted, file, over))
            for number in range(1 if options.cut == "auto" else options.threads)
        ]
        for thread in threads:
            thread.start()
        sys.stdin.read()
        over.set()
        for thread in threads:
            thread.join()
        if isinstance(asker, AutoClient):
            asker.close()
    return 0


def _auto(client: EdgeClient, server: str) -> AutoClient:
    assert client.spec is not None and client.spec.example() is not None
    args, kwargs = client.spec.example() or ((), {})
    plan = client.wrapped.plan(*args, **kwargs).digest
    loaded = LoadedModel(client.choice, client.spec, client.wrapped, args, kwargs, plan)
    with gather(loaded, SurveySources(server=server, seconds=1.0), lambda text: None, False) as found:
        auto = AutoClient(client, SplitController(found.edge, found.cloud, found.link, found.load))
    auto.monitor.start()
    return auto


def _ask(
    asker: EdgeClient | AutoClient,
    client: EdgeClient,
    options: argparse.Namespace,
    number: int,
    wanted: list[torch.Tensor],
    file: int,
    over: threading.Event,
) -> None:
    draw = random.Random(f"{options.seed} {options.cut} {number}")
    cuts = list(CUTS.values())
    while not over.wait(draw.uniform(0, 2 * options.pause)):
        kind, asked = draw.randrange(KINDS), time.monotonic()
        known: dict[str, Any] = {"asked": asked}
        try:
            if options.cut == "mixed":
                answer: Answer = client.infer(inputs(kind), split=draw.choice(cuts))
            else:
                answer = asker.infer(inputs(kind))
            known["came"] = "ok" if _same(answer.output, wanted[kind]) else "wrong"
            known |= {"sends": answer.sends, "split": answer.split, "id": answer.request_id}
            known |= {"instead": answer.fallback} if answer.fallback else {}
        except Exception as error:
            known |= {"came": type(error).__name__, "why": str(error)[:300]}
        known |= {"answered": time.monotonic(), "client": client._client_id}
        os.write(file, json.dumps(known).encode() + b"\n")


def _same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return found.dtype == wanted.dtype and found.numpy().tobytes() == wanted.numpy().tobytes()


if __name__ == "__main__":
    Path(sys.argv[4]).touch()
    sys.exit(main())
