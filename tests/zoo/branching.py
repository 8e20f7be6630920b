"""Small models with branches, for cuts along them: towers, U-Nets, pyramids, detectors, encoders with decoders."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class TwoTowers(nn.Module):
    """Two inputs that meet at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.right = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(16, 4)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        out: Tensor = self.head(torch.cat([self.left(left), self.right(right * 2) + 1], 1))
        return out


class SmallUNet(nn.Module):
    """Skip connections, a write in place on each way, and a side output."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, padding=1)
        self.lower = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.bottom = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.side = nn.Conv2d(4, 1, 1)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        first = torch.relu_(self.down(image))
        side = self.side(first)
        second = torch.relu(self.lower(first))
        up = self.up(self.bottom(second) + second).mul_(2)
        return {"out": self.out(torch.cat([first, up], 1)), "side": side.sigmoid()}


class Inception(nn.Module):
    """Convolutions side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.branches = nn.ModuleList(nn.Conv2d(4, 4, size, padding=size // 2) for size in (1, 3, 5))
        self.norm = nn.BatchNorm2d(12)
        self.fc = nn.Linear(12, 5)

    def forward(self, image: Tensor) -> Tensor:
        image = self.stem(image)
        joined = self.norm(torch.cat([branch(image) for branch in self.branches], 1)).relu()
        out: Tensor = self.fc(joined.mean((2, 3)))
        return out


class Pyramid(nn.Module):
    """A way up, lateral connections, a way down, and one head for all levels."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Conv2d(3 if not level else 4, 4, 3, 2, 1) for level in range(3))
        self.laterals = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(3))
        self.head = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, image: Tensor) -> list[Tensor]:
        levels = []
        for up in self.ups:
            image = up(image).relu()
            levels.append(image)
        levels = [lateral(level) for lateral, level in zip(self.laterals, levels, strict=True)]
        for level in (1, 0):
            levels[level] = levels[level] + functional.interpolate(levels[level + 1], scale_factor=2.0)
        return [self.head(level) for level in levels]


class TwoStages(nn.Module):
    """Proposals of a fixed number, cut out of the features by what the first stage says."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.proposals = nn.Conv2d(4, 1, 1)
        self.boxes = nn.Linear(4, 4)
        self.classes = nn.Linear(4, 3)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.backbone(image)
        scores = self.proposals(features).flatten(1)
        best = scores.topk(5, dim=1).indices
        picked = features.flatten(2).transpose(1, 2).gather(1, best[..., None].expand(-1, -1, 4))
        return self.boxes(picked), self.classes(picked).softmax(-1), scores.sigmoid()


class Attention(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.query, self.both = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, tokens: Tensor, others: Tensor) -> Tensor:
        key, value = self.both(others).chunk(2, -1)
        out: Tensor = self.out(functional.scaled_dot_product_attention(self.query(tokens), key, value))
        return out


class PictureAndText(nn.Module):
    """Pictures and texts in one space, as CLIP has them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.picture = Attention()
        self.words = nn.Embedding(20, 8)
        self.text = Attention()
        self.to_picture, self.to_text = nn.Linear(8, 6), nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        patches = self.patches(pixels).flatten(2).transpose(1, 2)
        words = self.words(ids)
        picture = functional.normalize(self.to_picture(self.picture(patches, patches).mean(1)), dim=-1)
        text = functional.normalize(self.to_text(self.text(words, words)[:, -1]), dim=-1)
        return self.scale.exp() * picture @ text.T


class EncoderDecoder(nn.Module):
    """A decoder that looks at what an encoder has made."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.encoder = Attention()
        self.decoder = Attention()
        self.cross = Attention()
        self.head = nn.Linear(8, 20)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.words(source)
        memory = memory + self.encoder(memory, memory)
        tokens = self.words(target)
        tokens = tokens + self.decoder(tokens, tokens)
        out: Tensor = self.head(tokens + self.cross(tokens, memory))
        return out


class Overwriting(nn.Module):
    """Views, and writes in place that some orders would show."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        one = self.one(value)
        two = self.two(one)
        view = one[:, :3]
        one.add_(1)
        three = self.three(one)
        self.relu(two)
        view.mul_(2)
        kept = torch.zeros_like(three)
        kept[:, 0] = two[:, 1]
        return two + three + kept, view


class Careless(nn.Module):
    """Its Python keeps count of what it does, and makes one layer's result another's attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.kept = Keeper()

    def forward(self, value: Tensor) -> Tensor:
        one = self.kept(self.one(value))
        two = self.two(value) + self.kept.last[0].mean()
        out: Tensor = self.three(two) * one
        return out


class Keeper(nn.Module):
    """Leaves what it was given where others find it, for as long as the forward lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.last: list[Tensor] = []

    def forward(self, value: Tensor) -> Tensor:
        found: Tensor = self.inner(value)
        self.last = [found]
        return found


class Typed(nn.Module):
    """Words, and a layer that is given no input but a constant, as BERT's types of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.types = nn.Embedding(20, 6), nn.Embedding(2, 6)
        self.norm, self.out = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        words = self.words(ids) * 2
        types = self.types(torch.zeros_like(ids))
        out: Tensor = self.out(self.norm(words + types))
        return out


def _numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _ids(*shape: int) -> Tensor:
    return torch.randint(20, shape, generator=torch.Generator().manual_seed(sum(shape)))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "two towers": (TwoTowers, (_numbers(2, 8), _numbers(3, 8)[:2])),
    "U-Net": (SmallUNet, (_numbers(1, 3, 8, 8),)),
    "Inception": (Inception, (_numbers(1, 3, 8, 8),)),
    "feature pyramid": (Pyramid, (_numbers(1, 3, 16, 16),)),
    "two-stage detector": (TwoStages, (_numbers(1, 3, 6, 6),)),
    "CLIP": (PictureAndText, (_numbers(2, 3, 8, 8), _ids(3, 5))),
    "encoder-decoder": (EncoderDecoder, (_ids(2, 5), _ids(2, 4))),
    "writes in place": (Overwriting, (_numbers(2, 6),)),
    "a constant's layer": (Typed, (_ids(2, 5),)),
    "Python state": (Careless, (_numbers(2, 6),)),
}
"""By name: what makes it (its weights are drawn from torch's generator), and inputs."""


def made(name: str) -> nn.Module:
    torch.manual_seed(5)
    return MODELS[name][0]().eval()
