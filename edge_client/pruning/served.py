"""What the choice gains, through a local server: bytes on the wire and time, whole against chosen."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edge_client.client import EdgeClient
from edge_client.given import Given
from edge_client.model_choice import ModelChoice
from edge_client.process import local_server
from shared_hooks.models import ModelSpec
from shared_hooks.models.inputs import to_device
from shared_hooks.selection.capture import Sample, run
from shared_hooks.showing import short

WARMUP = 3


@dataclass(frozen=True)
class Way:
    """One model to serve: the whole one, a mask, or a smaller one; ``split`` is where it is cut."""

    kind: str
    keep: int
    split: str
    selection: Path | None

    @property
    def model_id(self) -> str:
        return f"{self.kind}-{self.keep}"


@short
@dataclass(frozen=True)
class Served:
    """Medians over the requests of one way."""

    way: Way
    frontier_bytes: int
    """The tensors that cross."""
    bytes_up: int
    """With their header."""
    latency_ns: float
    quartiles_ns: tuple[float, float]
    exact: int
    """Answers equal, bit by bit, to the same model in one process."""
    right: int | None
    requests: int

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "frontier_bytes": self.frontier_bytes,
            "bytes_up": self.bytes_up,
            "latency_ns": self.latency_ns,
            "quartiles_ns": list(self.quartiles_ns),
            "exact": self.exact,
            "right": self.right,
            "requests": self.requests,
            "kind": self.way.kind,
            "keep": self.way.keep,
            "split": self.way.split,
        }


def serve(spec: ModelSpec, ways: Sequence[Way], items: Sequence[Given], choice: ModelChoice) -> list[Served]:
    """One round after the other, each way once a round, so that a machine that warms up favours none.

    ``spec`` is that of ``choice``, which names the model by words.
    """
    reference = str(choice.model).removeprefix(f"{spec.model_id}=")
    first, *others = ways
    arguments: list[str] = []
    for way in others:
        arguments += ["--model", f"{way.model_id}={reference}"]
    for way in ways:
        for file in choice.weights:
            arguments += ["--weights", f"{way.model_id}={file}"]
        if way.selection is not None:
            arguments += ["--selection", f"{way.model_id}={way.selection}"]
    with ExitStack() as stack:
        address = stack.enter_context(
            local_server(
                dataclasses.replace(choice, model=f"{first.model_id}={reference}", weights=(), selection=None),
                arguments=arguments,
            )
        )
        clients, models = [], []
        for way in ways:
            own = dataclasses.replace(spec, model_id=way.model_id, selection=way.selection)
            client = EdgeClient(address, choice.with_spec(own), way.split, metrics=False)
            clients.append(stack.enter_context(client))
            models.append(own.load_model(client.device))
        answers: list[list[Any]] = [[] for _ in ways]
        exact, right = [0] * len(ways), [0] * len(ways)
        for number, item in enumerate([*items[:WARMUP], *items]):
            args, kwargs = item.read(spec)
            for index, client in enumerate(clients):
                answer = client.infer(*args, **kwargs)
                if number < min(WARMUP, len(items)):
                    continue
                sample = Sample(to_device(args, client.device), to_device(kwargs, client.device))
                answers[index].append(answer)
                exact[index] += _same(answer.output, run(models[index], sample))
                said = next(iter(spec.postprocess(answer.output)), None)
                right[index] += said is not None and said.label == item.truth
        labelled = all(item.truth is not None for item in items)
        return [
            _served(way, clients[index], answers[index], exact[index], right[index] if labelled else None)
            for index, way in enumerate(ways)
        ]


def _served(way: Way, client: EdgeClient, answers: Sequence[Any], exact: int, right: int | None) -> Served:
    layer = next(layer for layer in client.wrapped.cuts if way.split in (layer.name, str(layer.layer_id)))
    times = sorted(answer.measured_ns for answer in answers)
    first, _, third = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    return Served(
        way=way,
        frontier_bytes=layer.frontier_bytes or 0,
        bytes_up=int(statistics.median(answer.bytes_up for answer in answers)),
        latency_ns=statistics.median(times),
        quartiles_ns=(first, third),
        exact=exact,
        right=right,
        requests=len(answers),
    )


def _same(a: Any, b: Any) -> bool:
    """Tensors alone or in sequences, mappings and objects with fields."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b.cpu())
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(_same, a, b))
    if hasattr(a, "__dict__"):
        return type(a) is type(b) and _same(vars(a), vars(b))
    return bool(a == b)
