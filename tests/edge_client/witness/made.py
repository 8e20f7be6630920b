"""A client and a server of one model, or of one that is a little wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from edge_client import EdgeClient
from edge_client.model_choice import ModelChoice
from tests.edge_client import fake_server as fake
from tests.edge_client import small_models
from tests.edge_client.fake_server import FakeServer
from tests.edge_client.test_client import built, image

CUT = "stage2.0.conv1"
CPU = torch.device("cpu")
Make = Callable[[], nn.Module]


@contextmanager
def pair(make: Make, split: int | str, *, serves: nn.Module | None = None, **options: Any) -> Iterator[EdgeClient]:
    """A client of ``make``'s model, and a server of ``serves``, by default of the same."""
    about, delay = options.pop("about", {}), options.pop("delay", lambda number: 0.0)
    with (
        FakeServer(fake.tails(serves or built(make), delay=delay), welcome={"about": about}) as server,
        EdgeClient(server.address, ModelChoice(built(make), model_id="m", device="cpu"), split, **options) as client,
    ):
        yield client


def wrong(by: float = 0.0) -> nn.Module:
    """`Residual` whose last bias is another: by one bit, or by so much."""
    model = built(small_models.Residual)
    with torch.no_grad():
        bias: Tensor = model.head.bias  # type: ignore[union-attr, assignment]
        bias[0] = bias[0] + by if by else torch.nextafter(bias[0], torch.tensor(9.0))
    return model


def whole(seed: int = 0) -> Tensor:
    with torch.no_grad():
        out: Tensor = built(small_models.Residual)(image(seed))
        return out
