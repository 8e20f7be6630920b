"""Hooks, parametrisations and modules that belong to somebody else, and modules nobody can look into."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.zoo.case import vector, zoo


class Net(nn.Module):
    """Three linear layers and a tanh, with a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.a(x))
        return self.c(self.act(self.b(hidden))) + hidden


@zoo(vector)
class WeightNormPreHook(Net):
    """The old weight_norm: a forward pre-hook sets `weight` on the module."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abc":
            torch.nn.utils.weight_norm(getattr(self, name))


@zoo(vector)
class WeightNormParametrization(Net):
    """The new weight_norm: `weight` is computed when it is read."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abc":
            parametrizations.weight_norm(getattr(self, name))


@zoo(vector)
class SpectralNormPreHook(Net):
    """The old spectral_norm."""

    def __init__(self) -> None:
        super().__init__()
        for name in "ab":
            torch.nn.utils.spectral_norm(getattr(self, name))


@zoo(vector)
class SpectralNormParametrization(Net):
    """The new spectral_norm and an orthogonal layer."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.a)
        parametrizations.orthogonal(self.b)


class Halved(nn.Module):
    """A parametrisation shared by two weights."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


@zoo(vector)
class SharedParametrization(Net):
    """One parametrisation module for two layers, cached during the forward."""

    def __init__(self) -> None:
        super().__init__()
        half = Halved()
        parametrize.register_parametrization(self.a, "weight", half)
        parametrize.register_parametrization(self.b, "weight", half)

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return super().forward(x)


@zoo(vector)
class UserHooksChangeOutputs(Net):
    """The user's hooks replace inputs and outputs of leaves and of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.a.register_forward_hook(lambda module, args, output: output * 2)
        self.b.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self.b.register_forward_hook(lambda module, args, kwargs, output: output - args[0], with_kwargs=True)
        self.act.register_forward_hook(lambda module, args, output: output.clamp(max=0.5), prepend=True)
        self.register_forward_hook(lambda module, args, output: (output, output.sum()))


@zoo(vector)
class UserHookReplacesWithDict(Net):
    """A user's hook turns a tensor into a dictionary, which the parent reads."""

    def __init__(self) -> None:
        super().__init__()
        self.b.register_forward_hook(lambda module, args, output: {"value": output, "twice": output * 2})

    def forward(self, x: Tensor) -> Tensor:
        found = self.b(self.a(x))
        return self.c(found["value"]) + found["twice"]


@zoo(vector)
class PatchedInstanceForward(Net):
    """`forward` replaced on the instance, as adapters do."""

    def __init__(self) -> None:
        super().__init__()

        def patched(module: nn.Linear, x: Tensor) -> Tensor:
            return nn.functional.linear(x, module.weight * 0.5, module.bias)

        self.b.forward = types.MethodType(patched, self.b)  # type: ignore[method-assign]


@zoo(vector)
class OverridesCall(Net):
    """A layer whose class overrides __call__."""

    class Calling(nn.Linear):
        def __call__(self, x: Tensor) -> Any:
            return super().__call__(x * 2) + 1

    def __init__(self) -> None:
        super().__init__()
        self.b = self.Calling(8, 8)


@zoo(vector)
class AdapterAroundLayer(Net):
    """A wrapper module that holds the wrapped one (LoRA)."""

    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.down, self.up = base, nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x)) * 0.5

    def __init__(self) -> None:
        super().__init__()
        self.b = self.Lora(self.b)  # type: ignore[assignment]


class Gate(nn.Module):
    """Scriptable: a branch on a value and a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.tanh(self.inner(x))
        if bool(x.sum() > 1e6):
            x = x * 2
        return x


@zoo(vector, listed=True)
class ScriptedSubmodule(Net):
    """A ScriptModule refuses hooks: one opaque layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.jit.script(Gate())

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate(torch.relu(self.a(x)))
        return self.c(self.act(self.b(x))) + x


@zoo(vector)
class TracedSubmodule(Net):
    """A traced module with an attribute that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.traced = torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.ones(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.traced(self.act(self.traced(self.a(x)))))


class Traceable(nn.Module):
    """What torch.fx takes in :class:`GraphModuleInside`."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.two(torch.relu(self.one(x)) + x))


@zoo(vector)
class GraphModuleInside(Net):
    """A torch.fx GraphModule in place of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.b = torch.fx.symbolic_trace(Traceable())  # type: ignore[assignment]


@zoo(vector)
class LazyLayers(nn.Module):
    """Layers that learned their shapes in a first call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.LazyLinear(8), nn.LazyBatchNorm1d()
        self(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.b(self.a(x)))


@zoo(vector)
class QuantisedDynamically(nn.Module):
    """Linear layers that hold packed int8 weights instead of parameters."""

    def __init__(self) -> None:
        super().__init__()
        plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        self.body = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear})
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.body(x)))


@zoo(vector)
class AttributeNamedLikeMethods(nn.Module):
    """Submodules with the names of things a wrapper may want: hooks, plan, layers, model, 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.plan, self.model = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.add_module("0", nn.Linear(8, 8))
        self.add_module("input", nn.Linear(8, 8))
        self.add_module("weird name#2", nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for name, layer in self.named_children():
            x = torch.tanh(layer(x)) + len(name)
        return x


@zoo(vector, max_refused=1.0, notes="a quantised tensor crosses; such cuts may be refused")
class QuantisedTensors(Net):
    """A skip kept as a quantised tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.quantize_per_tensor(torch.ones(1), 0.1, 0, torch.qint8)  # torch warns once that this will go away

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.quantize_per_tensor(self.a(x), 0.1, 0, torch.qint8)
        return self.c(self.act(self.b(x))) + kept.dequantize()
