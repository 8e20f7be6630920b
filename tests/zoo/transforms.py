"""Functions of functions: autograd, checkpoints, scripted functions, vmap, functional calls."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from tests.zoo.case import vector, zoo


class Ste(torch.autograd.Function):
    """Rounding with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


@zoo(vector)
class CustomAutogradFunction(nn.Module):
    """torch.autograd.Function.apply between and inside layers."""

    class Quantised(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return F.linear(Ste.apply(input), Ste.apply(self.weight), self.bias)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), self.Quantised(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = Ste.apply(self.a(x))
        return Ste.apply(self.b(x)) + x


@zoo(vector)
class Checkpoint(nn.Module):
    """torch.utils.checkpoint around a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x


def gate(x: Tensor, y: Tensor) -> Tensor:
    """What is scripted below: opaque to function modes."""
    return torch.sigmoid(x) * y + torch.tanh(x) * (1 - y)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecated, and found everywhere
    scripted_gate = torch.jit.script(gate)


@zoo(vector, max_refused=0.34, notes="what a scripted function gives cannot be injected where it crosses")
class ScriptedFunction(nn.Module):
    """A torch.jit.script function between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = scripted_gate(self.a(x), x)
        return scripted_gate(self.c(x), self.b(x))


@zoo(vector, max_refused=0.34, notes="no cut between a value and its gradient")
class GradientInsideForward(nn.Module):
    """The gradient of an energy is part of the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.energy, self.b = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        with torch.enable_grad():
            point = hidden.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.energy(torch.tanh(point)).sum(), point)
        return self.b(hidden - 0.1 * slope)


@zoo(vector)
class Vmapped(nn.Module):
    """torch.func.vmap over a parametrised function."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        mapped = torch.func.vmap(lambda row: torch.tanh(self.weight @ row))(hidden)
        return self.b(mapped) + hidden


@zoo(vector)
class MappedMask(nn.Module):
    """A mask that vmap makes of the inputs, as transformers does: read late, and no module's result before that."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        def allowed(row: Tensor, place: Tensor) -> Tensor:
            result = row.new_ones((), dtype=torch.bool)  # of the form alone
            return result & (row[place] > 0)

        mapped = torch.func.vmap(torch.func.vmap(allowed, in_dims=(None, 0)), in_dims=(0, None))
        mask = mapped(x, torch.arange(8).unsqueeze(-1))[..., 0]
        hidden = self.b(torch.tanh(self.a(x)))
        return self.c(hidden.masked_fill(mask, 0.0))


@zoo(vector)
class FunctionalCall(nn.Module):
    """torch.func.functional_call with parameters scaled by a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.inner, self.b = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        scaled = {name: value * 0.5 for name, value in self.inner.named_parameters()}
        return self.b(torch.func.functional_call(self.inner, scaled, (self.a(x),))) + x
