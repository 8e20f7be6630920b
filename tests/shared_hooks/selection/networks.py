"""Small networks whose channels can be followed by hand, and inputs for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shared_hooks.selection import Sample


def image(seed: int = 0, batch: int = 1) -> Tensor:
    return torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def samples(count: int = 8, classes: int = 2) -> list[Sample]:
    return [Sample((image(seed),), {}, (str(seed % classes),)) for seed in range(count)]


def seeded(model: nn.Module, seed: int = 0) -> nn.Module:
    """In eval mode, with weights and running statistics that are no defaults."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                positive = "running_var" in name
                tensor.copy_(
                    torch.rand(tensor.shape, generator=generator) * (1 if positive else 0.6) - (0 if positive else 0.3)
                )
                tensor.add_(0.5 if positive else 0.0)
    return model.eval()


class Chain(nn.Module):
    """Convolution, normalisation, activation, convolution without a border, pooling, flattening, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.second = nn.Conv2d(8, 6, 3, bias=False)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.third = nn.Linear(24, 5)
        self.last = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.relu(self.norm(self.first(x))))
        x = torch.relu(self.third(torch.flatten(self.pool(x), 1)))
        out: Tensor = self.last(x)
        return out


class Residual(nn.Module):
    """Two blocks on one residual stream, a depthwise convolution in it, one activation that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.inner = nn.Conv2d(8, 6, 1)
        self.outer = nn.Conv2d(6, 8, 1)
        self.relu = nn.ReLU()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.relu(x + self.depth(x))
        x = self.relu(x + self.outer(self.inner(x)))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class Tokens(nn.Module):
    """Channels last: input (n, 5, 6), output (n, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.embed(x)).mean(1))
        return out


class Grouped(nn.Module):
    """A grouped convolution and a concatenation: channels that cannot be cut out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.grouped = nn.Conv2d(8, 8, 1, groups=2)
        self.left = nn.Conv2d(8, 4, 1)
        self.head = nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.grouped(self.stem(x))
        out: Tensor = self.head(torch.cat([self.left(x), x], 1))
        return out


class Branching(nn.Module):
    """Looks at its data: torch.fx cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x if x.sum().item() > 0 else -x


class TiedWeights(nn.Module):
    """A decoder that reads the encoder's weights: (n, 6) -> (n, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 8)
        self.encoder = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(torch.relu(self.encoder(torch.relu(self.before(x)))), self.encoder.weight.t())


class Counting(nn.Module):
    """Scales by the number of channels, which it asks a tensor or (``own``) a layer for; calls its reader by name."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        self.own = own
        self.stem = nn.Conv2d(3, 8, 1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        count = self.stem.out_channels if self.own else x.size(1)
        out: Tensor = self.head(input=x * count**-0.5)
        return out


class ByName(nn.Module):
    """Its layers are called with keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(input=torch.relu(self.stem(input=x)))
        return out


class FlatSum(nn.Module):
    """Flattened channels and a linear layer's outputs added: (n, 3, 2, 2), (n, 5) -> (n, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.side = nn.Linear(5, 32)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        out: Tensor = self.head(torch.flatten(self.stem(x), 1) + self.side(other))
        return out


class Sequence1d(nn.Module):
    """Channels before time: (n, 3, 20) -> (n, 4, 20)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(3, 8, 3, padding=1)
        self.relu = nn.ReLU()
        self.head = nn.Conv1d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.relu(self.stem(x)))
        return out


class ChannelsLast(nn.Module):
    """As ConvNeXt's block: linear layers on (n, H, W, C) between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.wide = nn.Linear(8, 24)
        self.gelu = nn.GELU()
        self.narrow = nn.Linear(24, 8)
        self.after = nn.ReLU()
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        inner = self.narrow(self.gelu(self.wide(self.norm(x.permute(0, 2, 3, 1)))))
        out: Tensor = self.head(self.after(x + inner.permute(0, 3, 1, 2)))
        return out


class OwnList(nn.Module):
    """Calls its layers by references that PyTorch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.head = nn.Conv2d(8, 4, 16)
        self.order = [self.stem, self.head]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.order:
            x = layer(x)
        return x.flatten(1)
