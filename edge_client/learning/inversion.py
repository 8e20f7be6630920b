"""Attack what crosses a cut: train decoders to reconstruct the input, and score them.

The attacker has the codec, pairs of inputs and what crosses for them (of the user's own inputs or of public ones), and
some minutes. One with more data, or a better decoder, may recover more: the result is a lower bound.

Pictures are reconstructed by a convolutional decoder and scored by SSIM (Z. Wang et al., "Image quality assessment:
from error visibility to structural similarity", IEEE TIP 2004) and PSNR; tokens by the nearest row of the model's
embedding, and by a linear map to it; other numbers by a small network, scored by explained variance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from edge_client.learning.examples import Examples
from shared_hooks import devices
from shared_hooks.codecs import Codec, Grain
from shared_hooks.codecs.noise import Noise
from shared_hooks.crossing import Parcel
from shared_hooks.tensors import View

WIDTHS: Final[Mapping[str, tuple[int, int]]] = {"small": (32, 1), "large": (64, 2)}
"""By the name of a decoder: channels, and residual blocks at each size."""
STEPS: Final = 500
_BATCH: Final = 32
_MOST_DIMENSIONS: Final = 256
_RIDGE: Final = 1e-2
_COARSEST: Final = 4
_BEGIN: Final = 64
"""Pictures for a decoder's initialisation."""


def kind_of(examples: Examples) -> tuple[str, int]:
    """Return pictures, tokens or numbers, and the index of the tensor to attack: the largest picture or float tensor;
    of integers the one with the most distinct values, which is no mask.
    """
    floats = [at for at, one in enumerate(examples.inputs) if one.is_floating_point() and one[0].numel() > 1]
    pictures = [at for at in floats if _is_picture(examples.inputs[at])]
    for name, found in (("pictures", pictures), ("numbers", floats)):
        if found:
            return name, max(found, key=lambda at: examples.inputs[at][0].numel())
    return "tokens", max(range(len(examples.inputs)), key=lambda at: examples.inputs[at].unique().numel())


def _is_picture(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 5 and tensor.shape[1] == 1 and tensor.shape[2] <= 4 and min(tensor.shape[3:]) >= 8


def target_of(examples: Examples) -> tuple[str, torch.Tensor]:
    """Return the kind, and the tensor to attack: (n, C, H, W) of pictures, (n, T) of tokens, (n, D) of numbers."""
    kind, at = kind_of(examples)
    found = examples.inputs[at]
    if kind == "pictures":
        return kind, found[:, 0].float()
    return kind, found.reshape(len(found), -1) if kind == "tokens" else found.reshape(len(found), -1).float()


@dataclass(frozen=True)
class Feature:
    """One piece of many inputs: (n, C, H, W) of maps, (n, T, D) of tokens. ``exact``: integers."""

    values: torch.Tensor
    is_map: bool
    exact: bool = False


def crossing_features(examples: Examples, codec: Codec, dice: np.random.Generator) -> list[Feature]:
    """Return what an attacker sees of each piece: decoded, as on the server. Noise is drawn from ``dice``."""
    found = []
    for number, (piece, grain) in enumerate(zip(examples.pieces, examples.grains, strict=True)):
        own = codec.at(examples.cut, number)
        if isinstance(own, Noise) and piece.is_floating_point():
            rows = torch.stack([own.added(one, dice) for one in piece])
        elif codec.lossless or not piece.is_floating_point():
            rows = piece
        else:
            rows = torch.stack([_there_and_back(one, grain, own) for one in piece])
        if not rows[0].numel():
            continue
        found.append(_as_feature(rows, examples.crossing.views[number]))
    return found


def _there_and_back(flat: torch.Tensor, grain: Grain, codec: Codec) -> torch.Tensor:
    parcel = Parcel.of_tensors("", [flat], [codec], [grain])
    _, [found] = Parcel.tensors(parcel.header, bytearray().join(parcel.buffers))
    return found.clone()


def _as_feature(rows: torch.Tensor, view: View) -> Feature:
    """Reshape to a feature. ``view``: the layout of one row's elements."""
    shape, exact = view.shape, not rows.is_floating_point()
    values = rows.as_strided((len(rows), *shape), (rows.shape[1], *view.stride))
    if len(shape) == 4 and shape[0] == 1:
        return Feature(values[:, 0].float(), True, exact)
    if len(shape) >= 2 and shape[-1] > 1:
        return Feature(values.reshape(len(rows), -1, shape[-1]), False, exact)
    return Feature(values.reshape(len(rows), -1, 1), False, exact)


def input_features(kind: str, target: torch.Tensor) -> list[Feature]:
    """Return the input itself as a feature, as if it crossed."""
    if kind == "pictures":
        return [Feature(target, True)]
    return [Feature(target.reshape(len(target), -1, 1), False, kind == "tokens")]


def noise_features(features: Sequence[Feature], dice: np.random.Generator) -> list[Feature]:
    """Return noise of the same shapes, without information on the input."""
    return [
        Feature(torch.from_numpy(dice.standard_normal(tuple(one.values.shape), dtype=np.float32)), one.is_map)
        for one in features
    ]


# -- pictures and numbers ------------------------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, 1, 1), nn.Conv2d(width, width, 3, 1, 1)
        self.norm = nn.GroupNorm(8, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.second(torch.relu(self.first(torch.relu(self.norm(x)))))
        return found


class PictureDecoder(nn.Module):
    """Features -> pictures (N, C, H, W): each piece enters at the size nearest to its own, from coarse to fine.

    ``width``: channels at half the picture's size; twice as many at coarser sizes, half as many at its own.
    """

    def __init__(self, features: Sequence[Feature], size: torch.Size, width: int, depth: int) -> None:
        super().__init__()
        channels, height, wide = size
        steps = max(0, int(math.log2(min(height, wide) / _COARSEST)))
        self._sizes = [(-(-height // 2**step), -(-wide // 2**step)) for step in range(steps, -1, -1)]
        widths = [width // 2 if not step else width if step == 1 else 2 * width for step in range(steps, -1, -1)]
        self._at: list[int] = []
        self.joins = nn.ModuleList()
        for one in features:
            _, second, third = one.values.shape[:3]
            side = third if one.is_map else max(2.0, math.sqrt(second))
            at = min(range(steps + 1), key=lambda level: abs(math.log(self._sizes[level][0] / side)))
            self._at.append(at)
            self.joins.append(
                nn.Conv2d(second, widths[at], 1) if one.is_map else _Mixed(second, third, self._sizes[at], widths[at])
            )
        self._whole = [at for at, one in enumerate(features) if one.is_map and one.values.shape[2:] == size[1:]]
        whole = sum(features[at].values.shape[1] for at in self._whole)
        self.straight = nn.Conv2d(whole, channels, 1) if whole else None
        self.grows = nn.ModuleList(
            nn.Conv2d(before, after, 3, 1, 1) for before, after in zip([widths[0], *widths], widths, strict=False)
        )
        self.blocks = nn.ModuleList(nn.Sequential(*(_Block(one) for _ in range(depth))) for one in widths)
        self.last = nn.Conv2d(widths[-1], channels, 3, 1, 1)
        nn.init.zeros_(self.last.weight)
        self._first = widths[0]

    def forward(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        x = torch.zeros(len(pieces[0]), self._first, *self._sizes[0])
        for level, size in enumerate(self._sizes):
            x = self.grows[level](_resized(x, size))
            for at, join, piece in zip(self._at, self.joins, pieces, strict=True):
                if at == level:
                    x = x + _resized(join(piece), size)
            x = self.blocks[level](x)
        found: torch.Tensor = self.last(torch.relu(x))
        return found if self.straight is None else found + self.straight(self._at_full_size(pieces))

    def _at_full_size(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([pieces[at] for at in self._whole], dim=1)

    def begin(self, pieces: Sequence[torch.Tensor], wanted: torch.Tensor) -> None:
        """Initialise training with a per-pixel least-squares fit to the pieces of a picture's own size."""
        if self.straight is None:
            return
        given = self._at_full_size(pieces).transpose(0, 1).flatten(1).T
        goal = wanted.transpose(0, 1).flatten(1).T
        given = torch.cat([given, torch.ones(len(given), 1)], dim=1).double()
        gram = given.T @ given
        gram += 1e-6 * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
        found = torch.linalg.solve(gram, given.T @ goal.double()).float()
        with torch.no_grad():
            self.straight.weight.copy_(found[:-1].T[:, :, None, None])
            assert self.straight.bias is not None
            self.straight.bias.copy_(found[-1])


def _resized(x: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    if x.shape[-2:] == size:
        return x
    return functional.interpolate(x, size=size, mode="bilinear", align_corners=False)


class _Mixed(nn.Module):
    """Tokens (N, T, D) -> a map: each position of it reads all tokens."""

    def __init__(self, tokens: int, features: int, size: tuple[int, int], width: int) -> None:
        super().__init__()
        self._size, self._width = size, width
        places = size[0] * size[1]
        self.inner = nn.Linear(features, width if tokens > 1 else width * places)
        self.outer = nn.Linear(tokens, places) if tokens > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if self.outer is None:
            return x.reshape(len(x), self._width, *self._size)
        found: torch.Tensor = self.outer(x.transpose(1, 2)).reshape(len(x), self._width, *self._size)
        return found


class _NumbersDecoder(nn.Module):
    def __init__(self, features: Sequence[Feature], size: int, width: int) -> None:
        super().__init__()
        given = sum(one.values[0].numel() for one in features)
        self.straight = nn.Linear(given, size)
        self.bent = nn.Sequential(nn.Linear(given, 8 * width), nn.ReLU(), nn.Linear(8 * width, size))

    def forward(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        flat = torch.cat([piece.flatten(1) for piece in pieces], dim=1)
        found: torch.Tensor = self.straight(flat) + self.bent(flat)
        return found


@dataclass(frozen=True, eq=False)
class Inverter:
    """A trained decoder, and the features that it was trained on."""

    net: nn.Module
    scaled: Sequence[torch.Tensor]
    middle: torch.Tensor
    spread: torch.Tensor

    def given_back(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the reconstruction of these examples, in the form of inputs."""
        with torch.no_grad():
            parts = [self.net([one[some] for one in self.scaled]) for some in numbers.split(64)]
        return torch.cat(parts) * self.spread + self.middle


def invert(
    features: Sequence[Feature],
    target: torch.Tensor,
    learn: torch.Tensor,
    *,
    seed: int,
    decoder: str = "small",
    steps: int = STEPS,
) -> Inverter:
    """Train a decoder on the examples ``learn``. ``decoder``: of `WIDTHS`."""
    width, depth = WIDTHS[decoder]
    with devices.forked(seed=seed), torch.enable_grad():
        scaled = _standard(features, learn)
        middle, spread = target[learn].mean(0), target[learn].std(correction=0).clamp(min=1e-6)
        wanted = (target - middle) / spread
        net: nn.Module = (
            PictureDecoder(features, target.shape[1:], width, depth)
            if target.dim() == 4
            else _NumbersDecoder(features, target.shape[1], width)
        )
        if isinstance(net, PictureDecoder):
            some = learn[:_BEGIN]
            net.begin([one[some] for one in scaled], wanted[some])
        optimiser = torch.optim.AdamW(net.parameters(), 2e-3, weight_decay=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps + 1, pct_start=0.1)
        dice = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            some = learn[torch.randint(0, len(learn), (min(_BATCH, len(learn)),), generator=dice)]
            loss = functional.mse_loss(net([one[some] for one in scaled]), wanted[some])
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimiser.step()
            schedule.step()
    return Inverter(net.eval(), scaled, middle, spread)


def _standard(features: Sequence[Feature], learn: torch.Tensor) -> list[torch.Tensor]:
    """Normalise each channel to mean 0 and deviation 1 over the training examples."""
    found = []
    for one in features:
        values = one.values.float()
        axis = 1 if one.is_map else values.dim() - 1
        axes = [at for at in range(values.dim()) if at != axis]
        mean, width = values[learn].mean(axes, keepdim=True), values[learn].std(axes, correction=0, keepdim=True)
        found.append(((values - mean) / (width + 1e-3 * width.mean() + 1e-9)).clamp(-20, 20))
    return found


def picture_scores(made: torch.Tensor, wanted: torch.Tensor, span: float) -> dict[str, float]:
    """Return means over all pictures. ``span``: the range of a picture's values."""
    from skimage.metrics import structural_similarity

    ssim, psnr = [], []
    for one, own in zip(made.double().numpy(), wanted.double().numpy(), strict=True):
        one = np.clip(one, own.min() - span, own.max() + span)
        window = min(7, min(own.shape[1:]) // 2 * 2 - 1)
        how: dict[str, Any] = {"data_range": span, "channel_axis": 0, "win_size": window}
        ssim.append(float(structural_similarity(own, one, **how)))  # type: ignore[no-untyped-call]
        error = float(np.mean((one - own) ** 2))
        psnr.append(min(100.0, 10 * math.log10(span**2 / error)) if error else 100.0)
    return {"ssim": float(np.mean(ssim)), "psnr": float(np.mean(psnr))}


def explained(made: torch.Tensor, wanted: torch.Tensor, mean: torch.Tensor) -> float:
    """Return the share of the variance around ``mean`` that is explained."""
    total = float(((wanted - mean) ** 2).sum())
    return 1 - float(((made - wanted) ** 2).sum()) / total if total else 0.0


# -- tokens ----------------------------------------------------------------------------------------------------------


def embedding_of(model: nn.Module, most: int) -> torch.Tensor | None:
    """Return the largest embedding with at least as many rows as there are tokens: (V, D)."""
    found = [one.weight for one in model.modules() if isinstance(one, nn.Embedding) and one.num_embeddings > most]
    return None if not found else max(found, key=lambda one: one.shape[0]).detach().float().cpu()


def tokens_recovered(
    features: Sequence[Feature],
    tokens: torch.Tensor,
    embedding: torch.Tensor | None,
    learn: torch.Tensor,
    attacked: torch.Tensor,
) -> dict[str, float]:
    """Return shares of the tokens of the examples ``attacked``: by the ``nearest`` row of the embedding, by a ``probe``
    trained on ``learn`` (a linear map to the embedding's rows; without one, to the tokens seen), and ``recovered``, the
    better of both.
    """
    exact = [one.values for one in features if one.exact and one.values.numel() == tokens.numel()]
    if any(torch.equal(one.reshape(tokens.shape).long(), tokens.long()) for one in exact):
        return {"nearest": 1.0, "probe": 1.0, "recovered": 1.0}
    rows = [one.values.float() for one in features if not one.exact and one.values.shape[1] == tokens.shape[1]]
    if not rows:
        return {"nearest": 0.0, "probe": 0.0, "recovered": 0.0}
    nearest = 0.0
    if embedding is not None:
        fitting = [one for one in rows if one.shape[2] == embedding.shape[1]]
        nearest = max((_hits(one[attacked], tokens[attacked], embedding) for one in fitting), default=0.0)
    probe = _probed(torch.cat(rows, dim=2), tokens, embedding, learn, attacked)
    return {"nearest": nearest, "probe": probe, "recovered": max(nearest, probe)}


def _hits(rows: torch.Tensor, tokens: torch.Tensor, embedding: torch.Tensor) -> float:
    """Return the share of tokens found by cosine."""
    table = functional.normalize(embedding, dim=1)
    flat, wanted = functional.normalize(rows.reshape(-1, rows.shape[-1]), dim=1), tokens.reshape(-1)
    hits = sum(
        int((part @ table.T).argmax(1).eq(own).sum())
        for part, own in zip(flat.split(512), wanted.split(512), strict=True)
    )
    return hits / len(wanted)


def _probed(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    embedding: torch.Tensor | None,
    learn: torch.Tensor,
    attacked: torch.Tensor,
) -> float:
    """Return the share of tokens found by ridge regression."""
    flat, wanted = rows[learn].reshape(-1, rows.shape[-1]).double(), tokens[learn].reshape(-1)
    seen = wanted.unique()
    table = embedding if embedding is not None else torch.eye(int(tokens.max()) + 1)[:, seen]
    goal = functional.normalize(table, dim=1)[wanted].double()
    mean, width = flat.mean(0), flat.std(0) + 1e-6
    ones = torch.ones(len(flat), 1, dtype=torch.float64)
    given = torch.cat([(flat - mean) / width, ones], dim=1)
    gram = given.T @ given
    gram += _RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    weights = torch.linalg.solve(gram, given.T @ goal)
    requested = rows[attacked].reshape(-1, rows.shape[-1]).double()
    requested = torch.cat([(requested - mean) / width, torch.ones(len(requested), 1, dtype=torch.float64)], dim=1)
    made = (requested @ weights).float()
    return _hits(made, tokens[attacked], table)


# -- labels ----------------------------------------------------------------------------------------------------------


def label_share(
    features: Sequence[Feature], labels: torch.Tensor, learn: torch.Tensor, attacked: torch.Tensor, seed: int
) -> float:
    """Return the accuracy on ``attacked`` labels of a linear probe trained on ``learn``; wide features are reduced to
    their main components.
    """
    flat = torch.cat([one.flatten(1) for one in _standard(features, learn)], dim=1)
    with devices.forked(seed=seed), torch.enable_grad():
        if flat.shape[1] > _MOST_DIMENSIONS:
            _, _, axes = torch.pca_lowrank(flat[learn], q=min(_MOST_DIMENSIONS, len(learn) - 1))
            flat = flat @ axes
        flat = flat / (flat[learn].std() + 1e-9)
        probe = nn.Linear(flat.shape[1], int(labels.max()) + 1)
        optimiser = torch.optim.AdamW(probe.parameters(), 1e-2, weight_decay=1e-2)
        for _ in range(300):
            loss = functional.cross_entropy(probe(flat[learn]), labels[learn])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return float((probe(flat[attacked]).argmax(1) == labels[attacked]).float().mean())


@dataclass(frozen=True)
class Split:
    """Indices of the attacker's training examples, and of the attacked ones."""

    learn: torch.Tensor
    attacked: torch.Tensor

    @classmethod
    def of(cls, count: int, seed: int, most: int, public: int = 0) -> Split:
        """Use three of four for training; with ``public`` ones, which come last, only those."""
        dice = torch.Generator().manual_seed(7000 + seed)
        if public:
            own = torch.randperm(count - public, generator=dice)
            return cls(torch.arange(count - public, count), own[:most])
        order = torch.randperm(count, generator=dice)
        attacked = min(most, max(1, count // 4))
        return cls(order[attacked:], order[:attacked])


def as_array(pictures: torch.Tensor, span: tuple[float, float]) -> npt.NDArray[np.uint8]:
    """Return (n, H, W, C) of 8 bits."""
    low, high = span
    scaled = ((pictures - low) / max(1e-9, high - low)).clamp(0, 1) * 255
    return scaled.round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
