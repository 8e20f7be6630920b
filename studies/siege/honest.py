"""An honest process: real `EdgeClient`s on digits, at changing cuts, every answer compared bit for bit.

It obeys JSON lines on standard input and answers each with one:

* ``{"begin": HOST:PORT, "token": ..., "clients": [{...}, ...]}``: they connect, and ask; answers with their client ids.
  What is in a client's table: see `Asker`
* ``{"phase": NAME}``: what begins from now on is counted there
* ``{"count": NAME}``: answers with how many answers came in a phase until now
* ``{"end": true}``: disconnects; answers with what came of each phase, client by client
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections import Counter, defaultdict
from typing import Any

import torch
from torch import nn

from edge_client.client import EdgeClient
from edge_client.model_choice import ModelChoice
from edge_client.transport.options import ConnectionOptions
from shared_hooks import WrappedModel
from shared_hooks.models import load_spec
from shared_hooks.tensors import identical

DIGITS = "digits"
CUTS: list[int | str] = ["input", 0, 7, 20, 33, 45]
INPUTS = 8
PATIENCE = 30.0


class Asker:
    """One client. ``pause``: seconds between an answer and the next request. ``rows``: of each input. ``threads``: that
    ask at the same time. ``deadline``: seconds for a request.
    """

    def __init__(self, model: nn.Module, address: str, seed: int, token: str = "", rows: int = 1, pause: float = 0.02,
                 cuts: list[int | str] = CUTS, threads: int = 1, deadline: float = 60.0) -> None:  # fmt: skip
        self.phase = "warming up"
        self._seed, self._pause, self._cuts, self._count = seed, pause, cuts, threads
        generator = torch.Generator().manual_seed(seed)
        self._inputs = [torch.randn(rows, 1, 32, 32, generator=generator) for _ in range(INPUTS)]
        with WrappedModel(model) as local:
            self._wanted = [local.whole(x) for x in self._inputs]
        self._client = EdgeClient(
            address,
            ModelChoice(DIGITS, device="cpu", threads=1),
            "input",
            connection=ConnectionOptions(patience=PATIENCE, max_in_flight=max(4, threads), **_shown(token)),
            deadline=deadline,
        )
        self._over = threading.Event()
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._errors: dict[str, Counter[str]] = defaultdict(Counter)
        self._wrong: Counter[str] = Counter()
        self._threads: list[threading.Thread] = []

    def begin(self) -> str:
        """Connects, and asks at each cut once, so that plans are made; returns the client id."""
        self._client.open()
        for cut in self._cuts:
            self._client.infer(self._inputs[0], split=cut)
        for number in range(self._count):
            chance = random.Random((self._seed, number).__repr__())
            self._threads.append(threading.Thread(target=self._ask, args=(chance,), daemon=True))
            self._threads[-1].start()
        return self._client._client_id

    def _ask(self, chance: random.Random) -> None:
        while not self._over.is_set():
            which, cut, phase = chance.randrange(INPUTS), chance.choice(self._cuts), self.phase
            began = time.monotonic()
            try:
                output = self._client.infer(self._inputs[which], split=cut).output
                if not identical(output, self._wanted[which]):
                    self._wrong[phase] += 1
                self._seconds[phase].append(time.monotonic() - began)
            except Exception as error:
                self._errors[phase][f"{type(error).__name__}: {error!s:.160}"] += 1
                self._over.wait(0.05)
            self._over.wait(self._pause)

    def count(self, phase: str) -> int:
        """Answers until now."""
        return len(self._seconds[phase])

    def stop(self) -> None:
        self._over.set()

    def end(self) -> dict[str, Any]:
        """By phase: seconds of each answer, errors by their text, wrong answers."""
        until = time.monotonic() + 2 * PATIENCE
        for thread in self._threads:
            thread.join(max(0.1, until - time.monotonic()))
        stuck = sum(thread.is_alive() for thread in self._threads)
        if stuck:
            self._errors[self.phase]["a request did not end"] += stuck
        closing = threading.Thread(target=self._client.close, daemon=True)
        closing.start()
        closing.join(10)
        phases = {*self._seconds, *self._errors}
        return {
            phase: {"seconds": self._seconds[phase], "errors": self._errors[phase], "wrong": self._wrong[phase]}
            for phase in phases
        }


def _shown(token: str) -> dict[str, Any]:
    """What proves who the caller is."""
    if not token:
        return {}
    from edge_client.credentials import Credentials

    return {"credentials": Credentials(token=token)}


def main() -> int:
    torch.set_num_threads(1)
    number, model = int(sys.argv[1]), load_spec(DIGITS).load_model()
    askers: list[Asker] = []
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        reported = json.loads(line)
        try:
            if "begin" in reported:
                clients = reported.get("clients", [{}])
                token = reported.get("token", "")
                askers = [
                    Asker(model, reported["begin"], 100 * number + k, **{"token": token, **client})
                    for k, client in enumerate(clients)
                ]
                answer: Any = [asker.begin() for asker in askers]
            elif "phase" in reported:
                for asker in askers:
                    asker.phase = reported["phase"]
                answer = "ok"
            elif "count" in reported:
                answer = sum(asker.count(reported["count"]) for asker in askers)
            else:
                for asker in askers:
                    asker.stop()
                answer = [asker.end() for asker in askers]
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
