"""The zoo's models by name, as a server's file can say them."""

from __future__ import annotations

from torch import nn

from tests.zoo import CASES


def of_zoo(name: str) -> nn.Module:
    return next(case for case in CASES if case.name == name).build()
