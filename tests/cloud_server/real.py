"""Real models and real processes for the tests of the server."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from protos.frames import cut
from protos.isthmus.v1 import split_pb2
from shared_hooks import EarlyOutput, Parcel, WrappedModel
from tests.cloud_server.fakes import Client
from tests.starts import Started
from tests.waiting import PATIENCE

STARTUP = 120.0  # seconds; importing torch on a busy machine takes most of them
HELD = "ISTHMUS_TEST_HELD"
"""The environment's folder in which a tail of 14 says that it was entered, and waits until it is opened."""


class Residual(nn.Module):
    """A small model with a skip connection. A first input of 13 makes its tail raise, of 14 wait (`HELD`)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.mood = Mood()
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.first(x)
        hidden = self.second(torch.relu(hidden)) + hidden
        return {"logits": self.last(self.mood(hidden, x)), "hidden": hidden}


class Mood(nn.Module):
    def forward(self, hidden: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        first = float(x.flatten()[0])
        if first == 13:
            raise ValueError("thirteen")
        if first == 14 and (folder := os.environ.get(HELD)):
            Path(folder, "entered").touch()
            while not Path(folder, "opened").exists():
                time.sleep(0.01)
        return hidden


def greet(
    wrapped: WrappedModel, model_id: str, plan_digest: str = "", client_id: str = "real"
) -> split_pb2.ClientFrame:
    """The hello of an edge that holds ``wrapped``."""
    return split_pb2.ClientFrame(
        hello=split_pb2.Hello(
            protocol_version=3,
            client_id=client_id,
            model_id=model_id,
            weights_hash=wrapped.weights_hash(),
            structure_digest=wrapped.structure_digest(),
            plan_digest=plan_digest,
            environment=wrapped.environment(),
            about={"torch": torch.__version__},
        )
    )


def ask(client: Client, id: int, early: EarlyOutput, codec: str = "raw", **changes: Any) -> None:
    """Sends what crosses the cut."""
    parcel = early.pack(codec)
    crossing = early.crossing
    values = {"id": id, "cut_digest": crossing.digest, "header": parcel.header, "payload_bytes": parcel.nbytes}
    client.send(
        split_pb2.ClientFrame(cut=split_pb2.CutUpload(digest=crossing.digest, data=crossing.to_bytes())),
        split_pb2.ClientFrame(request=split_pb2.RequestHeader(**{**values, **changes})),
        *cut(id, parcel.buffers, 256 << 10),
    )


def value(client: Client, id: int) -> Any:
    """The model's output, as it came back."""
    result = client.answer(id)
    assert result.reply is not None, result.failed
    return Parcel.to_value(result.reply.header, result.data)


class Process:
    """A ``cloud-server`` process; ``port`` is where it listens. ``held``: see `HELD`."""

    def __init__(self, *arguments: str, cwd: Path | None = None, held: Path | None = None) -> None:
        self.process = Started(
            "cloud_server",
            ["--listen", "127.0.0.1:0", "--threads", "1", *arguments],
            cwd=cwd,
            env=os.environ if held is None else {**os.environ, HELD: str(held)},
        )
        # A child that prints much must not wait for a reader.
        self._log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        guard = threading.Timer(STARTUP, self.process.kill)
        guard.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        guard.cancel()
        assert line.startswith("listening on 127.0.0.1:"), self.log
        self.port = int(line.rpartition(":")[2])

    def _read(self) -> None:
        assert self.process.stderr is not None
        self._log += self.process.stderr

    @property
    def log(self) -> str:
        return "".join(self._log)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        status = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(PATIENCE)
        assert self.process.stdout is not None and self.process.stderr is not None
        self.process.stdout.close()
        self.process.stderr.close()
