"""Fresh copies of one model on both sides of every cut, several requests: the whole model's bits, or a refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shared_hooks import EarlyOutput, WrappedModel, session
from shared_hooks.errors import CutRefused, InputMismatch, PlanMismatch
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
