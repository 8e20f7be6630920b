"""Corners of Python and PyTorch that models use without anybody thinking of them as special."""

from __future__ import annotations

import copy
import enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence, pad_sequence

from tests.zoo.case import Call, Draw, add, call, sequence, vector, zoo
from tests.zoo.control import Four

SCRATCH: dict[str, Tensor] = {}


@zoo(vector, max_refused=1.0, notes="values leave a module by the side")
class GlobalScratch(Four):
    """A module leaves its value in a dictionary of the program; another takes it from there."""

    class Put(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            SCRATCH["kept"] = x * 2
            return x + 1

    class Get(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + SCRATCH["kept"]

    def __init__(self) -> None:
        super().__init__()
        self.put, self.get = self.Put(), self.Get()

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.get(torch.tanh(self.b(self.put(self.a(x))))))


@zoo(vector)
class ModuleMadeInForward(Four):
    """Activations built on the spot."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(nn.Softmax(-1)(self.a(x))) + nn.Sequential(nn.Tanh(), nn.Flatten())(self.c(x))


@zoo(vector)
class KeywordCalls(Four):
    """Layers called by keyword, with literals and a positional-only rest."""

    class Mix(nn.Module):
        def forward(self, x: Tensor, /, *, scale: float, other: Tensor | None = None) -> Tensor:
            return x * scale if other is None else x * scale + other

    def __init__(self) -> None:
        super().__init__()
        self.mix = self.Mix()

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(input=x)
        return self.b(input=self.mix(self.mix(y, scale=2.0), other=x, scale=0.5))


@zoo(vector)
class IdentityOfObjects(Four):
    """`is` decides: whether a module handed back the very tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        g = self.same(h)
        h = self.b(h) if g is h else self.c(h)
        return self.d(h) + (g if g is not x else 2 * g)


@zoo(vector, loud=True, notes="a placeholder is a subclass of Tensor; `type(x) is Tensor` tells")
class ExactTypeChecks(Four):
    """`type(x) is Tensor`, isinstance, is_tensor, Parameter or not."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.c):
            x = layer(x)
            x = torch.tanh(x) if type(x) is Tensor and not isinstance(x, nn.Parameter) else x * 2
            x = x + 1 if torch.is_tensor(x) and x.__class__ is Tensor else x
        return self.d(x)


@zoo(vector, max_refused=0.75, notes="copy.deepcopy takes the storage of a tensor out of torch's sight")
class CopiesTensors(Four):
    """copy.copy, copy.deepcopy, clone, Tensor(x), torch.tensor(x), as_tensor."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        kept = copy.deepcopy(h)
        h = self.b(copy.copy(h))
        h = torch.as_tensor(h) + h.clone().detach()
        return self.d(self.c(h).new_tensor([1.0]) * h) + kept


@zoo(vector)
class WritesAfterFlatten(Four):
    """A layer that gives a view of its input, written in place; the input is read again."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.back = nn.Flatten(0), nn.Unflatten(0, (2, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        flat = self.flat(h)
        y = self.b(self.back(flat))
        flat += 1.0
        return self.c(y) + h


@zoo(vector)
class InferenceModeInside(Four):
    """Part of the forward runs under inference_mode."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        with torch.inference_mode():
            x = self.c(torch.tanh(self.b(x)))
        return self.d(x.clone() * 2)


@zoo(vector)
class DeviceContextInside(Four):
    """`with torch.device(...)` is a function mode of the model's own, open across several layers."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.device("cpu"):
            x = self.b(self.a(x) + torch.ones(8))
            x = self.c(x * torch.arange(8))
        return self.d(x) + torch.zeros(8)


@zoo(sequence)
class KernelContextInside(Four):
    """Attention under sdpa_kernel, a record_function around a layer."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            x = F.scaled_dot_product_attention(self.a(x), self.b(x), x)
            with torch.profiler.record_function("a layer"):
                x = self.c(x)
        return self.d(x)


@zoo(lambda draw: call(draw.randn(2, 8)), branches=True)
class LogsValues(Four):
    """Tensors formatted, printed to strings and asserted on the way."""

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        h = self.a(x)
        text = f"{h.mean():.3f}"
        assert torch.isfinite(h).all(), "never"
        h = self.b(h)
        text += str(h.shape) + f"{h.norm().item():.2e}"
        torch._assert(h.ndim == 2, "two dimensions")
        return self.d(self.c(h)), text


def spiky(draw: Draw) -> Call:
    x = draw.randn(2, 8)
    x[0, 0], x[1, 1] = float("inf"), float("nan")
    return call(x)


@zoo(spiky, branches=True)
class OddNumbersRead(Four):
    """inf, nan, -0.0, complex and very large integers read as Python numbers."""

    def forward(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        top, nan, zero = x[0].max().item(), x[1].sum().item(), (x[0, 1:2] * -0.0).tolist()
        z = torch.complex(x[0, 1:3], x[0, 3:5]).sum().item()
        large = ((x[0, 5] > 100).long() + (1 << 62)).item()
        h = self.b(self.a(torch.nan_to_num(x, posinf=1.0)))
        return self.d(h) * (1 if nan != nan and top > 0 else 2) + z.real, [top, nan, zero, z, large]


class Mood(enum.Enum):
    """An enumeration handed from module to module."""

    GOOD = 1
    BAD = 2


@zoo(vector, max_refused=1.0, notes="literals of rare classes; cuts where a module gives them may be refused")
class RareLiterals(Four):
    """A module returns a shape, a dtype, a slice, a range, an enum, a set, a complex number and bytes."""

    class Facts(nn.Module):
        def forward(self, x: Tensor) -> tuple[Any, ...]:
            return x * 2, x.shape, x.dtype, slice(1, 3), range(2), Mood.GOOD, {1, 2}, 1 + 2j, b"raw", ...

    def __init__(self) -> None:
        super().__init__()
        self.facts = self.Facts()

    def forward(self, x: Tensor) -> Tensor:
        x, shape, dtype, part, numbers, mood, many, z, raw, dots = self.facts(self.a(x))
        x = self.b(x)
        x = x + x[:, part].sum() * len(numbers) + len(many) * z.imag + len(raw)
        return self.c(x[dots].to(dtype).view(shape)) if mood is Mood.GOOD else x


add("data_parallel_on_cpu", lambda: nn.DataParallel(Four1()), vector)


class Four1(Four):
    """What DataParallel wraps."""

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x))) + x


@zoo(lambda draw: call([draw.randn(n, 8) for n in (5, 3, 2)]))
class RaggedList(nn.Module):
    """Sequences of different lengths, padded in one place and packed in another."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.lstm, self.out = nn.Linear(8, 6), nn.LSTM(6, 4), nn.Linear(4, 2)

    def forward(self, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        packed, (h, _) = self.lstm(pack_sequence([torch.tanh(self.inp(row)) for row in rows]))
        padded, lengths = pad_packed_sequence(packed)
        return self.out(padded) + pad_sequence(rows)[..., :2], self.out(h) / lengths[:, None]
