"""The inputs of requests, by the program's way of being called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from studies.fuzz.party import Party


def inputs(party: Party, way: str, number: int, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of request ``number``: equal values at every call, fresh memory, classes of this party."""
    drawn = torch.randn(2, batch, 8, generator=torch.Generator().manual_seed(number))
    x, late = drawn[0].clone(), drawn[1].clone()
    match way:
        case "one":
            return (x,), {}
        case "two":
            return (x, late), {}
        case "keyword":
            return (x,), {"late": late}
        case "start and end":
            return (), {"start": x, "end": late}
        case "same twice":
            return (x, x), {}
        case "view of the first":
            return (x, x[:1]), {}
        case "list":
            return ([x, late],), {}
        case "dict":
            return ({"x": x, "late": late},), {}
        case "odd address":
            memory = torch.empty(batch * 8 + 1)
            memory[1:] = x.flatten()
            return (memory[1:].view(batch, 8),), {}
        case "odd wide":  # of the list only
            memory = torch.empty(batch * 1001 + 1)
            memory[1:] = torch.randn(batch * 1001, generator=torch.Generator().manual_seed(number))
            return (memory[1:].view(batch, 1001),), {}
        case "subclass":
            tagged: Tensor = x.as_subclass(party.module.Tagged)
            tagged.scale = 2.0  # type: ignore[attr-defined]
            return (tagged,), {}
        case "number":
            return (x, 0.5), {}
        case "conjugate":
            return (torch.view_as_complex(x.reshape(batch, 4, 2)).conj(),), {}
    raise AssertionError(way)
