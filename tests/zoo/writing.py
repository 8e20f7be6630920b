"""Writes in place: what is banked must be the value at the cut, and aliases must stay aliases."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import image, sequence, vector, zoo


class Three(nn.Module):
    """Three linear layers, `a`, `b`, `c`, of width 8."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.relu = nn.ReLU(inplace=True)


@zoo(vector, listed=True)
class InPlaceReluAfterBankedLayer(Three):
    """The banked output is overwritten right after the cut."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        early = hidden.sum(-1, keepdim=True)
        self.relu(hidden)
        return self.c(self.relu(self.b(hidden))) + early


@zoo(vector, listed=True)
class BaseAndViewCrossThenWrite(Three):
    """A base and a view of it cross; the base is written later and the view read after that."""

    def forward(self, x: Tensor) -> Tensor:
        base = self.a(x)
        view = base[:, 2:6]
        hidden = self.b(x)
        base.mul_(2.0)
        hidden = self.c(hidden + base)
        base += 1.0
        return hidden + view.repeat(1, 2)


@zoo(vector)
class ViewCrossesBaseWrittenThroughIt(Three):
    """The view is written, the base is read."""

    def forward(self, x: Tensor) -> Tensor:
        base = self.a(x)
        view = base.view(2, 2, 4).transpose(1, 2)
        hidden = self.b(base)
        view[:, 1:3] = hidden.view(2, 4, 2)[:, :2]
        return self.c(hidden) + base


@zoo(vector)
class TwoViewsNoBase(Three):
    """Two overlapping views cross, their base does not; one is written, the other read."""

    def forward(self, x: Tensor) -> Tensor:
        base = self.a(x)
        left, right = base[:, :5], base[:, 3:]
        hidden = self.b(x)
        left.add_(1.0)
        hidden = self.c(hidden)
        right.mul_(3.0)
        return hidden + torch.cat([left, right[:, :3]], 1)


@zoo(image)
class InPlaceResidualSum(nn.Module):
    """`x += residual` between in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.relu = nn.ReLU6(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            residual = x
            x = self.relu(conv(x))
            x += residual
        return x


@zoo(vector)
class ExpandedViewCrosses(Three):
    """A stride-0 view and a strided view cross."""

    def forward(self, x: Tensor) -> Tensor:
        row = self.a(x)[:1].expand(2, 8)
        every_other = self.a(x)[:, ::2]
        hidden = self.b(x)
        return self.c(hidden * row) + every_other.repeat_interleave(2, 1)


@zoo(sequence)
class TransposedCrosses(Three):
    """A permuted tensor crosses; kernels may depend on its strides."""

    def forward(self, x: Tensor) -> Tensor:
        turned = self.a(x).permute(2, 0, 1)
        hidden = self.b(x)
        return self.c(torch.softmax(turned, 0).permute(1, 2, 0) @ hidden.transpose(1, 2) @ hidden)


@zoo(vector)
class ChunkWrittenInPlace(Three):
    """unbind and chunk give views; writes through them change the base."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        for i, row in enumerate(hidden.unbind(0)):
            row.add_(float(i))
        left, right = hidden.chunk(2, 1)
        left.mul_(self.b(x)[:, :4])
        return self.c(hidden) + right.repeat(1, 2)


@zoo(vector)
class WriteThroughDetachAndData(Three):
    """`.detach()` and `.data` are aliases too."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        hidden.detach().add_(1.0)
        other = self.b(hidden)
        other.data.mul_(hidden.data)
        return self.c(other) + hidden


@zoo(vector)
class AsStridedWindow(Three):
    """Overlapping windows by as_strided and unfold, written and read."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        windows = hidden.unfold(1, 4, 2)
        strided = hidden.as_strided((2, 4), (8, 2))
        out = self.b(hidden)
        strided.neg_()
        return self.c(out) + windows.sum(-1).repeat(1, 3)[:, :8]


@zoo(vector)
class InPlaceOnOldValue(Three):
    """A value made before the first layer is written after each of them."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.clone()
        for layer in (self.a, self.b, self.c):
            x = torch.tanh(layer(x))
            total += x
        return total


@zoo(vector)
class InPlaceFunctional(Three):
    """F.relu(inplace=True), sigmoid_, clamp_, F.dropout in eval."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.a(x), inplace=True)
        kept = hidden
        hidden = F.dropout(self.b(hidden).sigmoid_(), training=self.training)
        kept.clamp_(max=0.3)
        return self.c(hidden + kept)


@zoo(vector)
class ReluOnViewOfBanked(Three):
    """An in-place ReLU through a reshaped view, after which the original is read."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        flat = hidden.view(-1)
        other = self.b(hidden)
        self.relu(flat)
        return self.c(other) + hidden


@zoo(vector)
class WritesIntoItsInput(Three):
    """The caller's own tensor is changed in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        x.add_(1.0)
        hidden = self.b(hidden + x)
        x.relu_()
        return self.c(hidden) * x


@zoo(vector)
class AliasedInContainer(Three):
    """A list holds a view; the base is written between the making of the list and its reading."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        parts = [hidden[i] for i in range(2)]
        other = self.b(hidden)
        hidden.copy_(other)
        return self.c(torch.stack(parts))


@zoo(vector)
class RealAndImaginaryViews(Three):
    """A complex tensor written through its real view."""

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(self.a(x), self.b(x))
        real = torch.view_as_real(z)
        hidden = self.c(x)
        real[..., 0] += hidden
        return z.abs() + z.real


@zoo(vector)
class ReshapesInPlace(Three):
    """`unsqueeze_`, `squeeze_` and `t_` change the shape of the very object, read later under its first name."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        half = hidden * 0.5
        hidden.unsqueeze_(1)
        half.t_()
        other = self.b(hidden)[:, 0]
        hidden.squeeze_(1)
        return self.c(other + half.t()) + hidden
