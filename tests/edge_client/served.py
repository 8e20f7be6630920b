"""A real cloud server in this process, with its counts; for what a process of its own would not show better."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from cloud_server import CloudServer, Core, Limits, ModelEntry, ServedModel
from cloud_server.telemetry import counted
from shared_hooks.lifecycle import Event, Lifecycle
from shared_hooks.models import ModelSpec, load_spec
from tests.waiting import PATIENCE

SPEC = """
id = "small"
factory = "tests.edge_client.served:Small"
[example]
args = [{shape = [1, 8]}]
"""


class Small(torch.nn.Module):
    """Layers "first", "second", "last"; input (n, 8), output (n, 8)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = torch.nn.Linear(8, 8)
        self.second = torch.nn.ReLU()
        self.last = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.second(self.first(x)))
        return out


@dataclass
class Gate:
    """While it is closed, the server's worker stays before the first tail that comes, and says so."""

    opened: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    free: int = 0
    received: int = 0
    """Requests that have come, all of each."""

    def close(self, free: int = 0) -> None:
        """``free`` tails may still pass."""
        self.free = free
        self.entered.clear()
        self.opened.clear()

    def after_receive(self, event: Event) -> None:
        """A hook of the server's, as the next."""
        self.received += 1

    def before_tail(self, event: Event) -> None:
        if self.opened.is_set():
            return
        self.free -= 1
        if self.free < 0:
            self.entered.set()
            self.opened.wait(PATIENCE)


@dataclass
class Served:
    """Where it listens, and what it counts."""

    address: str
    spec: ModelSpec
    registry: CollectorRegistry
    gate: Gate
    lifecycle: Lifecycle

    def count(self, name: str, **labels: str) -> float:
        """Return one of its counters; 0 where there is none yet."""
        return self.registry.get_sample_value(name, {"model": "small", "identity": "", **labels}) or 0.0


@contextmanager
def served(
    folder: Path, frames_bytes: int = 1 << 20, text: str = SPEC, limits: Limits | None = None
) -> Iterator[Served]:
    """Serves the model of a spec (`Small`) in ``folder``; the gate is open. ``frames_bytes``: kept of frames."""
    path = folder / "small.toml"
    path.write_text(text)
    spec, lifecycle, gate = load_spec(path), Lifecycle("cloud"), Gate()
    gate.opened.set()
    lifecycle.register(gate)
    engine = ServedModel(ModelEntry(spec), torch.device("cpu"), lifecycle, frames_bytes=frames_bytes)
    with Core([engine], limits, lifecycle=lifecycle) as core, counted(core, {}) as registry:
        server = CloudServer(core, "127.0.0.1:0")
        server.start()
        try:
            yield Served(f"127.0.0.1:{server.port}", spec, registry, gate, lifecycle)
        finally:
            gate.opened.set()
            server.drain()
            server.stop()
