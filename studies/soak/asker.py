"""The client's process: ``python -m studies.soak.asker HOST:PORT REQUESTS CLIENTS``.

Asks at changing cuts with four requests under way, and compares every answer bit for bit with the whole model's. After
every ``REQUESTS / CLIENTS`` requests it closes its client and makes another. It prints lines of JSON: what it asked,
and what was wrong or lost. The last has ``over``; then it stays, to be looked at, until its standard input ends.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator

import torch

from edge_client.answer import Failure
from edge_client.client import EdgeClient
from edge_client.model_choice import ModelChoice
from edge_client.transport.options import ConnectionOptions
from shared_hooks import WrappedModel
from shared_hooks.models import load_spec
from shared_hooks.tensors import identical

DIGITS = "digits"
CUTS: list[int | str] = ["input", 7, 20, 33, 45]
ROWS = (1, 2, 4)
INPUTS = 30
PATIENCE = 30.0


class Asker:
    """``inputs``: (tensor, the whole model's answer)."""

    def __init__(self, address: str) -> None:
        self._address = address
        generator = torch.Generator().manual_seed(1)
        self._inputs = [torch.randn(ROWS[k % len(ROWS)], 1, 32, 32, generator=generator) for k in range(INPUTS)]
        with WrappedModel(load_spec(DIGITS).load_model()) as local:
            self._wanted = [local.whole(x) for x in self._inputs]
        self._chance = random.Random(2)
        self.asked = self.wrong = self.clients = self.streams = self.again = 0
        self.lost: Counter[str] = Counter()
        self.over = False
        self._reported = 0.0

    def run(self, requests: int) -> None:
        """One client's life. A cut for all that is under way; several lots, one after the other."""
        client = EdgeClient(
            self._address,
            ModelChoice(DIGITS, device="cpu", threads=1),
            "input",
            connection=ConnectionOptions(patience=PATIENCE),
        )
        self.clients += 1
        with client:
            done = 0
            while done < requests:
                lot = min(25, requests - done)
                self._lot(client, lot)
                done += lot
            self.streams += client.counters.streams
            self.again += client.counters.resent

    def _lot(self, client: EdgeClient, count: int) -> None:
        picked = [self._chance.randrange(INPUTS) for _ in range(count)]
        inputs, cut = (self._inputs[k] for k in picked), self._chance.choice(CUTS)
        answers = client.infer_many(inputs, split=cut, failures="return")
        try:
            for k, answer in zip(picked, answers, strict=False):
                self.asked += 1
                if isinstance(answer, Failure):
                    self.lost[f"{type(answer.error).__name__}: {answer.error!s:.120}"] += 1
                elif not identical(answer.output, self._wanted[k]):
                    self.wrong += 1
                if time.monotonic() > self._reported + 0.2:
                    self.tell()
        except Exception as error:  # of the connection
            self.lost[f"{type(error).__name__}: {error!s:.120}"] += 1

    def tell(self) -> None:
        self._reported = time.monotonic()
        reported = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        print(json.dumps(reported), flush=True)


def shares(requests: int, clients: int) -> Iterator[int]:
    """How many requests each of so many clients makes."""
    edges = [requests * k // clients for k in range(clients + 1)]
    return (end - begin for begin, end in itertools.pairwise(edges))


def main() -> int:
    torch.set_num_threads(1)
    address, requests, clients = sys.argv[1:]
    asker = Asker(address)
    for share in shares(int(requests), int(clients)):
        asker.run(share)
    asker.over = True
    asker.tell()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
