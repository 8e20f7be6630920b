"""A real client and a real server in this process, whose life cycles note what is emitted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cloud_server.config import ModelEntry
from cloud_server.core import Core
from cloud_server.limits import Limits
from cloud_server.models.served_model import ServedModel
from cloud_server.transport.server import CloudServer
from edge_client import EdgeClient
from edge_client.model_choice import ModelChoice
from shared_hooks.config import Table
from shared_hooks.lifecycle import About, Event, Lifecycle, Stage
from shared_hooks.models import ModelSpec
from shared_hooks.models.spec import spec_from_table
from tests.waiting import eventually

EXAMPLE = {"args": [{"shape": [1, 3, 8, 8], "dtype": "float32", "low": 0, "high": 2}]}


class Residual(nn.Module):
    """Four layers, a skip connection: input (1, 3, 8, 8), output (1, 10). The last raises for values above 1000."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.body = nn.Conv2d(4, 4, 3, padding=1)
        self.relu = nn.ReLU()
        self.head = Head()

    def forward(self, image: Tensor) -> Tensor:
        stem = self.stem(image)
        out: Tensor = self.head(self.relu(self.body(stem) + stem).mean((2, 3)), image)
        return out


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 10)

    def forward(self, values: Tensor, image: Tensor) -> Tensor:
        if image.max() > 1000:
            raise ValueError("that is too much")
        out: Tensor = self.out(values)
        return out


def image(seed: int = 0) -> Tensor:
    return torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def too_much() -> Tensor:
    """What the tail raises for."""
    return torch.full((1, 3, 8, 8), 2000.0)


@cache
def _model() -> nn.Module:
    return Residual().eval()


def whole(*inputs: Tensor) -> Tensor:
    """What the model says by itself."""
    with torch.no_grad():
        found: Tensor = _model()(*(inputs or (image(),)))
    return found


@dataclass(frozen=True)
class Emitted:
    stage: Stage
    request: About | None
    facts: dict[str, Any]
    thread: str


class Spy(Lifecycle):
    """Notes everything that is emitted, whoever listens."""

    def __init__(self, side: str) -> None:
        super().__init__(side)
        self.emitted: list[Emitted] = []

    def emit(self, stage: Stage, request: About | None = None, **facts: Any) -> None:
        about = request or getattr(self._thread, "request", None)
        self.emitted.append(Emitted(stage, about, facts, threading.current_thread().name))
        super().emit(stage, request, **facts)

    def stages(self, id: int | None = None) -> list[str]:
        """The names of what was emitted, of one request if ``id`` is given."""
        found = list(self.emitted)
        return [one.stage.value for one in found if id is None or (one.request is not None and one.request.id == id)]

    def count(self, stage: Stage) -> int:
        return sum(one.stage is stage for one in list(self.emitted))

    def of(self, stage: Stage) -> list[Emitted]:
        return [one for one in list(self.emitted) if one.stage is stage]


@dataclass
class Service:
    """Both sides; ``events`` is what hooks on every stage were given."""

    edge: Spy
    cloud: Spy
    address: str
    server: CloudServer
    served: ServedModel
    spec: ModelSpec
    clients: list[EdgeClient] = field(default_factory=list)

    def client(self, split: int | str = "body", **options: Any) -> EdgeClient:
        made = EdgeClient(self.address, ModelChoice(self.spec, device="cpu"), split, lifecycle=self.edge, **options)
        self.clients.append(made)
        return made

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.stop(grace=1)

    def paired(self) -> None:
        """Every request has one beginning and, after it, one end, on either side."""
        for spy in (self.edge, self.cloud):
            eventually(lambda spy=spy: keys(spy, Stage.BEFORE_REQUEST) == keys(spy, Stage.AFTER_REQUEST))  # type: ignore[misc]
            ends = [one for one in spy.emitted if one.stage in (Stage.BEFORE_REQUEST, Stage.AFTER_REQUEST)]
            for key in keys(spy, Stage.BEFORE_REQUEST):
                own = [one.stage for one in ends if one.request and (one.request.client, one.request.id) == key]
                assert own == [Stage.BEFORE_REQUEST, Stage.AFTER_REQUEST]


def keys(spy: Spy, stage: Stage) -> list[tuple[str, int]]:
    """Return the requests that came to this stage."""
    return sorted((one.request.client, one.request.id) for one in spy.of(stage) if one.request is not None)


def spec_of(factory: str, example: dict[str, Any]) -> ModelSpec:
    return spec_from_table(Table({"id": "m", "factory": factory, "example": example}, "a test"), Path.cwd())


@contextmanager
def service(
    cloud: Spy | None = None, edge: Spy | None = None, spec: ModelSpec | None = None, **limits: Any
) -> Iterator[Service]:
    """``spec``: of the model, else `Residual` with an example, so that both sides plan at the start."""
    cloud = cloud or Spy("cloud")
    spec = spec or spec_of("tests.shared_hooks.lifecycle.service:Residual", EXAMPLE)
    served = ServedModel(ModelEntry(spec), torch.device("cpu"), cloud)
    server = CloudServer(Core([served], Limits(**limits), lifecycle=cloud), "127.0.0.1:0")
    server.start()
    made = Service(edge or Spy("edge"), cloud, f"127.0.0.1:{server.port}", server, served, spec)
    try:
        yield made
    finally:
        made.close()


def everywhere(lifecycle: Lifecycle, call: Callable[[Event], object], name: str = "everywhere") -> None:
    """``call`` at every stage of this side."""
    lifecycle.on(*Stage, name=name)(lambda event: call(event))
