"""A model that is slow on the edge and quick on the server, and a link between them whose latency a test sets: where
it had better be cut depends on that alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from cloud_server.config import ModelEntry
from cloud_server.core import Core
from cloud_server.limits import Limits
from cloud_server.models.served_model import ServedModel
from cloud_server.transport.server import CloudServer
from edge_client import EdgeClient
from edge_client.model_choice import ModelChoice
from edge_client.transport import ConnectionOptions
from shared_hooks.models import ModelSpec, load_spec
from studies.experiments.relay import Relay

EDGE_SECONDS = 0.2
"""Far more than what a busy machine adds to a request, which would move the cut as well."""
SPEC = """
id = "lag"
factory = "tests.edge_client.live.lag:build"

[[example.args]]
shape = [1, 8]
"""


class Slow(nn.Module):
    """The server's threads have names of their own."""

    def forward(self, values: Tensor) -> Tensor:
        if not threading.current_thread().name.startswith("isthmus-"):
            time.sleep(EDGE_SECONDS)
        return values * 2


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 64), Slow(), nn.Linear(64, 4))


@dataclass
class Lag:
    """``relay.delay``: seconds, one way."""

    spec: ModelSpec
    relay: Relay
    server: CloudServer
    address: str
    """The relay's address."""
    folder: Path
    """Where ``lag.toml`` is."""

    def client(self, split: str = "0", **options: object) -> EdgeClient:
        """Not yet opened."""
        choice = ModelChoice(self.spec, device="cpu")
        connection = ConnectionOptions(max_in_flight=1)
        return EdgeClient(self.address, choice, split, connection=connection, **options)  # type: ignore[arg-type]


@contextmanager
def served(folder: Path) -> Iterator[Lag]:
    """Both, in this process."""
    file = folder / "lag.toml"
    file.write_text(SPEC)
    spec = load_spec(str(file))
    with ExitStack() as stack:
        core = Core([ServedModel(ModelEntry(spec), torch.device("cpu"))], Limits(), observers=("activation",))
        server = CloudServer(core, "127.0.0.1:0")
        server.start()
        stack.callback(server.stop, grace=1)
        relay = stack.enter_context(Relay(("127.0.0.1", server.port)))
        yield Lag(spec, relay, server, f"127.0.0.1:{relay.address[1]}", folder)
