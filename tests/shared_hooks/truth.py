"""Fresh copies of one model on both sides of every cut, several requests: the whole model's bits, or a refusal."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.errors import CutRefused, InputMismatch, PlanMismatch
from shared_hooks.forward import session
from tests.zoo.compare import bits, same

Request = tuple[Any, ...] | Callable[[], tuple[Any, ...]]


@dataclass
class Truth:
    """What became of every cut. ``wrong``: another answer, another error, a server whose memory moved."""

    exact: list[int | str] = field(default_factory=list)
    refused: dict[int | str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def memory_of(model: nn.Module) -> list[bytes]:
    """Every bit of the parameters and buffers."""
    return [bits(tensor) for tensor in [*model.parameters(), *model.buffers()]]


def truth(model: nn.Module, requests: Sequence[Request], *, branches: bool = False, seed: int | None = None) -> Truth:
    """Cut a model everywhere, by copies of it that have never run, and answer the requests in order.

    ``branches``: a request that takes another path may be answered with a `PlanMismatch`. ``seed``: of torch's
    generator before every whole forward and every head.
    """

    def fresh() -> nn.Module:
        return copy.deepcopy(model).eval()

    def arguments(request: Request) -> Any:
        return request() if callable(request) else copy.deepcopy(request)

    def seeded() -> None:
        if seed is not None:
            torch.manual_seed(seed)

    whole, expected = fresh(), []
    with torch.no_grad():
        for request in requests:
            seeded()
            expected.append(session.snapshot(whole(*arguments(request))))
    found = Truth()
    planned = WrappedModel(fresh())
    try:
        planned.plan(*arguments(requests[0]))
        count = len(planned.layers)
    except (CutRefused, InputMismatch) as error:
        found.refused["plan"] = str(error)
        return found
    for cut in ("input", *range(count)):
        edge, cloud = WrappedModel(fresh()), WrappedModel(fresh())
        before = memory_of(cloud.model)
        verdict = None
        for number, request in enumerate(requests):
            try:
                seeded()
                early = edge.forward(*arguments(request), end=cut)
                if seed is not None:
                    torch.manual_seed(seed + 1)
                got = cloud.forward(EarlyOutput.from_bytes(early.to_bytes(), max_bytes=1 << 24), start=cut)
            except (CutRefused, InputMismatch) as error:
                found.refused[cut] = str(error)
                verdict = "refused"
                break
            except PlanMismatch as error:
                if not branches:
                    found.wrong.append(f"cut {cut}, request {number}: {type(error).__name__}: {error}")
                    verdict = "wrong"
                    break
                continue
            except Exception as error:
                found.wrong.append(f"cut {cut}, request {number}: {type(error).__name__}: {error}"[:300])
                verdict = "wrong"
                break
            if not same(got, expected[number]):
                found.wrong.append(f"cut {cut}, request {number}: another answer")
                verdict = "wrong"
                break
        if verdict is None and memory_of(cloud.model) != before:
            found.wrong.append(f"cut {cut}: the cloud's weights or buffers have changed")
            verdict = "wrong"
        if verdict is None:
            found.exact.append(cut)
    return found


def vectors(count: int = 3, *shape: int) -> list[Request]:
    """Requests of one tensor each, all different."""
    generator = torch.Generator().manual_seed(11)
    return [(torch.randn(shape or (2, 8), generator=generator),) for _ in range(count)]


EVERYWHERE: tuple[int | str, ...] = ("input", 0, 1, 2)


class Net(nn.Module):
    """Three linear layers and a buffer; what it does with them is a function of the net and the input."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("kept", torch.zeros(2, 8))
        self.kept: Tensor
        self.plain = torch.zeros(2, 8)
        self.run = forward

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


@dataclass(frozen=True)
class Claim:
    """What is claimed of one function: the cuts that are exact; why the others are refused."""

    forward: Forward
    exact: tuple[int | str, ...]
    because: str
    requests: Sequence[Request]
    branches: bool

    def check(self) -> None:
        """Every cut of a net with this function."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = Net(self.forward)
        found = truth(net, self.requests, branches=self.branches)
        assert not found.wrong, "\n".join(found.wrong)
        assert tuple(found.exact) == self.exact, found.refused
        for cut, reason in found.refused.items():
            assert re.search(self.because, reason), f"cut {cut}: {reason}"


Forward = Callable[[Net, Tensor], Any]


class Claims(list[Claim]):
    """The claims of one file, in order."""

    def __call__(
        self,
        *exact: int | str,
        because: str = "exact everywhere",
        requests: Sequence[Request] | None = None,
        branches: bool = False,
    ) -> Callable[[Forward], Forward]:
        """Decorates a function of the net and the input."""

        def add(forward: Forward) -> Forward:
            self.append(Claim(forward, exact, because, vectors() if requests is None else requests, branches))
            return forward

        return add

    def each(self) -> Any:
        """One test for each."""
        return pytest.mark.parametrize("claim", self, ids=lambda claim: claim.forward.__name__)
