"""Code that is not modules: functional calls, parameters used by hand, numpy, autograd, scripted functions."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from tests.zoo.case import image, sequence, vector, zoo


@zoo(image, listed=True)
class MostlyFunctional(nn.Module):
    """Convolutions through F with parameters; two small modules at the ends."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(6, 3)
        self.weight, self.bias = nn.Parameter(torch.randn(6, 4, 3, 3)), nn.Parameter(torch.zeros(6))
        self.register_buffer("shift", torch.randn(6, 1, 1))
        self.shift: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.max_pool2d(F.conv2d(x, self.weight, self.bias, padding=1), 2) + self.shift
        x = F.gelu(F.layer_norm(x, x.shape[1:]))
        return F.log_softmax(self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1)), dim=-1)


@zoo(vector, listed=True)
class ParameterThroughFunctionalLinear(nn.Module):
    """`mid` is never called: its weight goes through F.linear."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mid, self.b = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x))
        x = F.linear(x, self.mid.weight, self.mid.bias)
        return self.b(torch.relu(x))


@zoo(vector, listed=True)
class DirectForwardCall(nn.Module):
    """`mid.forward(x)` runs no hooks of `mid`, but its children's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.mid = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.leaf = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x))
        return self.b(self.leaf.forward(self.mid.forward(x))) + x


@zoo(sequence)
class FunctionalAttention(nn.Module):
    """Heads by hand and scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(x.shape[0], x.shape[1], 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2)) + x


@zoo(sequence)
class Einsum(nn.Module):
    """einsum, einops-like reshapes, outer products."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.core = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 4)) for layer in (self.q, self.k, self.v))
        scores = torch.einsum("bihd,de,bjhe->bhij", q, self.core, k).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", scores, v).flatten(-2)


@zoo(sequence)
class Fourier(nn.Module):
    """FNet mixing: torch.fft, complex values across the cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.filter = nn.Parameter(torch.randn(3, 8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.a(x), dim=1) * self.filter
        hidden = self.norm(x)
        return self.b(torch.fft.irfft(spectrum, n=x.shape[1], dim=1)) + hidden


@zoo(vector)
class ComplexNumbers(nn.Module):
    """Complex linear layers, conjugate views, polar form."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, dtype=torch.complex64), nn.Linear(8, 8, dtype=torch.complex64)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.a(torch.complex(x, -x))
        lazy = z.conj()
        w = self.b(z * torch.polar(torch.ones_like(x), x))
        return self.out((w * lazy).imag) + torch.neg(w.imag[:, :4])


@zoo(sequence)
class CatStackChunkSplit(nn.Module):
    """Every way of taking tensors apart and putting them together."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        left, right = x.chunk(2, -1)
        one, two, three = x.split([2, 2, 1], 1)
        x = self.b(torch.cat([right, left], -1))
        rows = x.unbind(1)
        x = torch.stack([rows[i] for i in (4, 3, 2, 1, 0)], 1)
        return self.c(torch.cat([two, three, one], 1) + torch.hstack([x[:, :3], x[:, 3:]]))


@zoo(sequence)
class IteratesOverTensor(nn.Module):
    """`for row in x`, `zip`, star unpacking, len()."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        rows = [torch.tanh(row) * (i + 1) for i, row in enumerate(x)]
        first, *rest = x
        y = self.b(torch.stack(rows) / len(x))
        return torch.stack([p + q for p, q in zip(y, x, strict=True)]) + first + rest[-1]


@zoo(vector)
class Where(nn.Module):
    """torch.where on a mask made early."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        mask = x > 0
        a = self.a(x)
        return torch.where(mask, a, self.b(a)) + torch.where(mask.any(-1, keepdim=True), 1.0, 0.0)


@zoo(vector, branches=True)
class MaskedSelect(nn.Module):
    """Data-dependent shapes: masked_select, nonzero, boolean indexing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(1, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.a(x)
        chosen = torch.masked_select(x, x > 0).unsqueeze(-1)
        where = (x > 0).nonzero()
        scored = self.c(torch.tanh(self.b(chosen))).squeeze(-1)
        out = torch.zeros_like(x)
        out[where[:, 0], where[:, 1]] = scored
        return out, scored[scored > 0]


@zoo(vector, max_refused=1.0, notes="numpy leaves torch's sight; cuts after it may be refused")
class NumpyRoundTrip(nn.Module):
    """To numpy and back in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        array = np.sort(hidden.detach().cpu().numpy(), axis=-1)
        hidden = self.b(torch.from_numpy(array))
        return self.c(hidden + float(np.asarray(hidden).sum()))


@zoo(image)
class Hypernetwork(nn.Module):
    """Convolution weights are computed from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.hyper, self.last = nn.Conv2d(3, 4, 3), nn.Linear(4, 4 * 4 * 9), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        kernels = self.hyper(x.mean((0, 2, 3))).view(4, 4, 3, 3)
        return self.last(F.relu(F.conv2d(x, kernels, padding=1)))


@zoo(vector)
class SparseProduct(nn.Module):
    """A sparse constant times a dense value."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        graph = torch.eye(2).to_sparse()
        return self.b(torch.sparse.mm(graph, hidden)) + hidden


@zoo(vector)
class OperatorsAndMagic(nn.Module):
    """Reflected and in-place operators, comparison, indexing with None and Ellipsis, matmul operator."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = 1 - self.a(x)
        h = 2 / (1 + abs(h)) ** 2
        h **= 0.5
        g = self.b(h[..., None, :][:, 0]) // 0.125
        g = (g @ g.T)[:, [0, 1, 0, 1, 0, 1, 0, 1]] % 3
        return -g + (h >= 0.5) - (~(h < 0.2)).float() + torch.tensor(3.0) * h
