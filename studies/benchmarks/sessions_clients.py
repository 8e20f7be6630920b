"""Several clients of one server at once; run in a process of its own by `sessions`.

``python -m studies.benchmarks.sessions_clients ADDRESS NETWORK CUT ROUNDS`` prints JSON: seconds a token, of all
sessions together, by way of asking and number of sessions, one value a round. ``replayed``: the steps of a generation
are recorded once and sent again, so that heads take no processor from the server. ``generated``: `generate()`, with
heads, of models that share their weights.
"""

from __future__ import annotations

import copy
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from edge_client import EdgeClient
from edge_client.generation import SessionLink
from edge_client.model_choice import ModelChoice
from edge_client.transport.options import ConnectionOptions
from shared_hooks.generation import SplitForward, StepReply
from studies.benchmarks.processes import target

LANGUAGE = "studies.benchmarks.language"
LENGTHS = (17, 40, 64, 23, 90, 31, 55, 12)
WORDS = 12
WAYS = {"alone": (1, True), "exact": (len(LENGTHS), True), "together": (len(LENGTHS), False)}
_numbers = itertools.count(1_000_000)

Step = tuple[dict[str, Any], list[torch.Tensor]]


class Recorded(SessionLink):
    """Keeps the steps."""

    def __init__(self, client: EdgeClient, cut: str) -> None:
        super().__init__(client, cut)
        self.steps: list[Step] = []

    def step(self, session: int, number: int, header: Any, tensors: Any, *rest: Any) -> StepReply:
        self.steps.append((copy.deepcopy(header), [tensor.clone() for tensor in tensors]))
        return super().step(session, number, header, tensors, *rest)


class Clock:
    """Times the words after each session's first: begins when all have it, and ends with the last."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count + 1)
        self.batch_size: list[int] = []

    def seconds(self, works: list[Callable[[], None]]) -> float:
        threads = [threading.Thread(target=work) for work in works]
        for thread in threads:
            thread.start()
        self.barrier.wait()
        began = time.perf_counter()
        for thread in threads:
            thread.join()
        return (time.perf_counter() - began) / (len(works) * (WORDS - 1))


class Clients:
    """All sessions are one client's."""

    def __init__(self, client: EdgeClient, cut: str) -> None:
        self._client, self._cut = client, cut
        self._models = [_same(client.wrapped.model) for _ in LENGTHS]
        self._records = []
        for length, model in zip(LENGTHS, self._models, strict=True):
            link = Recorded(client, cut)
            with SplitForward(model, cut, link, answer=("token",)):
                model.generate(**_prompt(length), max_new_tokens=WORDS, do_sample=False)
            self._records.append(link.steps)

    def replayed(self, count: int, exact: bool) -> tuple[float, list[int]]:
        """Seconds a token, and how many steps met in each."""
        clock, link = Clock(count), SessionLink(self._client, self._cut, exact=exact)

        def work(steps: list[Step]) -> None:
            session = next(_numbers)
            for number, (header, tensors) in enumerate(steps):
                if number == 1:
                    clock.barrier.wait()
                clock.batch_size.append(link.step(session, number, header, tensors).batch_size)
            link.close(session)

        return clock.seconds([lambda steps=steps: work(steps) for steps in self._records[:count]]), clock.batch_size  # type: ignore[misc]

    def generated(self, count: int, exact: bool) -> tuple[float, list[int]]:
        """As `replayed`."""
        clock = Clock(count)

        def work(model: Any, length: int) -> None:
            from transformers import LogitsProcessorList

            def first(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                if ids.shape[1] == length + 1:
                    clock.barrier.wait()
                return scores

            link = SessionLink(self._client, self._cut, exact=exact)
            with SplitForward(model, self._cut, link) as split:
                words = LogitsProcessorList([first])
                model.generate(**_prompt(length), max_new_tokens=WORDS, do_sample=False, logits_processor=words)
                clock.batch_size += [record.batch_size for record in split.records]

        pairs = zip(self._models[:count], LENGTHS, strict=False)
        return clock.seconds([lambda pair=pair: work(*pair) for pair in pairs]), clock.batch_size  # type: ignore[misc]


def _same(model: Any) -> Any:
    """Another model of the same weights in the same memory."""
    weights: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(weight): weight for weight in weights})


def _prompt(length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(6, 1000, (1, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def main() -> None:
    address, network, cut, rounds = sys.argv[1:]
    torch.set_num_threads(1)
    choice = ModelChoice(target(network, LANGUAGE), device="cpu", threads=1)
    seconds: dict[str, list[float]] = {}
    batch_size: dict[str, list[int]] = {}
    connection = ConnectionOptions(max_in_flight=len(LENGTHS))
    with EdgeClient(address, choice, metrics=False, connection=connection) as client:
        clients = Clients(client, cut)
        runs = {"replayed": clients.replayed, "generated": clients.generated}
        for turn in range(1 + int(rounds)):
            for (kind, run), (way, asked) in itertools.product(runs.items(), WAYS.items()):
                found, met = run(*asked)
                if turn:
                    seconds.setdefault(f"{kind} {way}", []).append(found)
                    batch_size.setdefault(f"{kind} {way}", []).extend(met)
    print(json.dumps({"seconds": seconds, "batch_size": batch_size}))


if __name__ == "__main__":
    main()
