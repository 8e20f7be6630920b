"""A server whose models come and go, and small models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from cloud_server.config import ServerConfig, read_config
from cloud_server.core import Core
from cloud_server.fleet import Fleet, ThisProcess
from cloud_server.transport import CloudServer
from shared_hooks import WrappedModel
from shared_hooks.models import load_spec
from tests.cloud_server.real import HELD as HELD


class Small(nn.Module):
    """``width``: how much memory it takes."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.second = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.relu(self.first(x))) + 1
        return out


class Deep(nn.Module):
    """Modules that hold others behind its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.rest = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.rest(torch.relu(self.first(x)))
        return out


def write_weights(path: Path, seed: int, width: int = 8) -> None:
    """Weights of `Small`, by another file of this name: never half of one."""
    torch.manual_seed(seed)
    fresh = path.with_suffix(f".{seed}")
    save_file(Small(width).state_dict(), str(fresh))
    fresh.replace(path)


def entry(name: str, weights: Path | None = None, width: int = 8, more: str = "") -> str:
    """Return an entry of a server's file: a `Small` model."""
    file = "" if weights is None else f'weights = "{weights}"\n'
    return (
        f'[models."{name}"]\nfactory = "{__name__}:Small"\nfactory_kwargs = {{width = {width}}}\n'
        f'{file}{more}\n[models."{name}".example]\nargs = [{{shape = [2, 8]}}]\n'
    )


def edge_of(name: str, weights: Path | None = None) -> WrappedModel:
    """What an edge holds."""
    spec = load_spec(f"{name}={__name__}:Small", weights=weights)
    return WrappedModel(spec.load_model())


@contextmanager
def fleet_of(path: Path, **limits: Any) -> Iterator[tuple[Fleet, CloudServer]]:
    """A server of what a file says, whenever it is read."""
    config: ServerConfig = read_config(path)
    fleet = Fleet(ThisProcess(config), config.models, lambda: read_config(path).models)
    workers = config.workers * len(config.device.split(","))
    server = CloudServer(Core(fleet, config.limits, workers), "127.0.0.1:0", rest="127.0.0.1:0", **limits)
    server.start()
    try:
        yield fleet, server
    finally:
        server.stop(grace=1)
