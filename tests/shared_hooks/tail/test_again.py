"""What a replay keeps for the next request of its cut gives each request its own answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared_hooks import WrappedModel
from shared_hooks.forward import context


class Between(nn.Module):
    """Operations between modules, of the inputs and of constants, the same one for both."""

    def __init__(self, *, tags: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))
        self.offset = nn.Parameter(torch.randn(6, 6))
        self.tags = tags

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).transpose(0, 1)
        x = torch.add(torch.add(torch.eye(6), 1), x) + self.offset.transpose(0, 1)
        x = torch.add(x, self.offset).flatten(0)
        if self.tags:
            x.mine = 1  # type: ignore[attr-defined]  # the next request must not see it
        skip = self.second(x.reshape(6, 6))
        result: Tensor = self.third(skip) + skip
        return result


@pytest.mark.parametrize("tags", [False, True])
@pytest.mark.parametrize("cut", ["first", "second", "third"])
def test_every_request_gets_its_own_answer(cut: str, tags: bool) -> None:
    plain = Between(tags=tags)
    edge, cloud = WrappedModel(Between(tags=tags)), WrappedModel(Between(tags=tags))
    for _ in range(4):
        x = torch.randn(6, 6)
        with torch.no_grad():
            assert torch.equal(cloud.forward(edge.forward(x, end=cut), start=cut), plain(x))


SWITCHES: list[tuple[Any, str]] = [
    (torch.backends.mkldnn, "enabled"),
    (torch.backends.cudnn, "enabled"),
    (torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cuda.matmul, "allow_tf32"),
]
CALLS: list[tuple[Any, Any]] = [
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
]


def test_no_setting_is_overlooked() -> None:
    before = context.settings()
    gets = [(lambda owner=owner, name=name: getattr(owner, name)) for owner, name in SWITCHES]
    sets = [(lambda value, owner=owner, name=name: setattr(owner, name, value)) for owner, name in SWITCHES]
    for get, put in [*zip(gets, sets, strict=True), *CALLS]:
        value = get()
        put(not value)
        try:
            assert context.settings() != before
        finally:
            put(value)
        assert context.settings() == before
