"""Number types, memory formats, autocast, frozen statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.case import Call, Draw, add, call, image, vector, zoo
from tests.zoo.settings import bfloat16_autocast


class ConvNet(nn.Module):
    """Convolution, norm, activation twice, with a skip and a classifier."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1, dtype=dtype), nn.BatchNorm2d(4, dtype=dtype)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, dtype=dtype), nn.BatchNorm2d(4, dtype=dtype)
        self.relu, self.fc = nn.ReLU(inplace=True), nn.Linear(4, 3, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(skip)) + skip)
        return self.fc(x.mean((2, 3)))


add(
    "bfloat16",
    lambda: ConvNet(torch.bfloat16),
    lambda d: call(d.randn(2, 3, 16, 16, dtype=torch.bfloat16)),
    listed=True,
)
add("float16", lambda: ConvNet(torch.float16), lambda d: call(d.randn(2, 3, 16, 16, dtype=torch.float16)))
add("float64", lambda: ConvNet(torch.float64), lambda d: call(d.randn(2, 3, 16, 16, dtype=torch.float64)))


def channels_last_image(draw: Draw) -> Call:
    return call(draw.randn(2, 3, 16, 16).to(memory_format=torch.channels_last))


def channels_last_net() -> nn.Module:
    return ConvNet().to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


add("channels_last", channels_last_net, channels_last_image, listed=True)
add("channels_last_weights_only", channels_last_net, image)
add("ambient_autocast", ConvNet, image, listed=True, setting=bfloat16_autocast, notes="autocast around the call")


@zoo(image, listed=True)
class AutocastInside(ConvNet):
    """Part of the forward runs under autocast, with an island of float32 in it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            skip = self.relu(self.bn1(self.conv1(x)))
            x = self.conv2(skip)
            with torch.autocast("cpu", enabled=False):
                x = self.bn2(x.float())
            x = self.relu(x + skip)
            pooled = x.mean((2, 3))
            scores = self.fc(pooled)
        return scores.float()


@zoo(image, listed=True)
class FrozenBatchNorm(nn.Module):
    """Statistics as buffers, applied by hand; and a BatchNorm left in eval inside a training model."""

    class Frozen(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            for name in ("weight", "bias", "mean", "var"):
                self.register_buffer(name, torch.rand(width) + 0.5)
            self.weight: Tensor
            self.bias: Tensor
            self.mean: Tensor
            self.var: Tensor

        def forward(self, x: Tensor) -> Tensor:
            scale = (self.weight * (self.var + 1e-5).rsqrt()).reshape(1, -1, 1, 1)
            return x * scale + (self.bias.reshape(1, -1, 1, 1) - self.mean.reshape(1, -1, 1, 1) * scale)

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3), self.Frozen(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(x))) + x


@zoo(vector)
class MixedTypes(nn.Module):
    """Every float type and int8 between the layers, all crossing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        half, small, flags = hidden.half(), (hidden * 10).to(torch.int8), hidden > 0
        brain = self.b(hidden.bfloat16())
        unsigned = (brain.float().abs() * 10).to(torch.uint8)
        double = self.c(brain.double())
        return double + half + small * flags + unsigned.to(torch.int16) + brain


@zoo(vector)
class EightBitFloats(nn.Module):
    """float8 storage of a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.a(x).to(torch.float8_e4m3fn)
        other = x.to(torch.float8_e5m2)
        return self.b(torch.tanh(x)) + kept.float() * other.float()


@zoo(lambda draw: call(draw.randn(2, 8, dtype=torch.complex64)))
class ComplexInput(nn.Module):
    """Complex in, complex out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(8, 8, dtype=torch.complex64) for _ in range(2))

    def forward(self, z: Tensor) -> Tensor:
        return self.b(self.a(z).conj() * z.abs()) - z


@zoo(vector)
class TrainingModeNorms(nn.Module):
    """A norm without running statistics normalises by the batch even in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False)
        self.instance, self.b = nn.InstanceNorm1d(2, affine=True), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.a(x))
        return self.b(self.instance(x[None])[0])


class PartlyWritten(nn.Module):
    """A part of a value is written through elements of another size; what is left of it is read behind that."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))


@zoo(vector)
class RealPartZeroed(PartlyWritten):
    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(self.a(x), x)
        other = self.b(z.imag)
        z.real.zero_()
        return self.c(other) + z.abs()


@zoo(vector)
class ImaginaryPartAssigned(PartlyWritten):
    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(self.a(x), x)
        z.imag = self.b(z.real)
        return self.c(z.imag) + z.abs()


@zoo(vector)
class RowOfComplexNumbersAssigned(PartlyWritten):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        other = self.b(h)
        torch.view_as_complex(h.view(-1, 4, 2))[0] = 1j
        return self.c(other) + h


@zoo(vector)
class HalfOfEachNumberWritten(PartlyWritten):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        other = self.b(h)
        h.view(torch.bfloat16)[:, 1::2].mul_(2)
        return self.c(other) + h


@zoo(vector)
class OneByteWritten(PartlyWritten):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        other = self.b(h)
        h.view(torch.uint8)[0, 3] = 0
        return self.c(other) + h


@zoo(vector)
class NumbersInABufferOfBytes(PartlyWritten):
    def forward(self, x: Tensor) -> Tensor:
        buffer = torch.zeros(8 * x.numel(), dtype=torch.uint8)
        rows = buffer.view(torch.float32).view(2 * len(x), 8)
        rows[: len(x)] = self.a(x)
        rows[len(x) :] = self.b(rows[: len(x)])
        other = self.c(rows[len(x) :])
        return other + rows[: len(x)] + buffer.sum()
