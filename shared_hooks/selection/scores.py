"""A score for every channel of a layer: the higher, the more it is worth keeping. Each scoring is one function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Final

import numpy as np
import torch
from torch import nn

from shared_hooks.errors import CutRefused, InputMismatch, SpecError, near
from shared_hooks.selection.capture import Captured, Sample
from shared_hooks.selection.channels import CONVOLUTIONS, NORMS, trace
from shared_hooks.selection.clusters import by_silhouette, needs_scikit

Scoring = Callable[[Captured, nn.Module, Sample, int], torch.Tensor]

MOST_CLUSTERS: Final = 16


def score(name: str, captured: Captured, model: nn.Module, sample: Sample, seed: int = 0) -> torch.Tensor:
    """(C,) float64 by the scoring ``name`` (`SCORINGS`); ``sample`` is what the model is traced on where needed.

    Raises SpecError for an unknown name, and InputMismatch or CutRefused where this scoring has nothing to go by.
    """
    if name not in SCORINGS:
        raise SpecError(f'no scoring "{name}"; there is {", ".join(SCORINGS)}.{near(name, SCORINGS)}')
    return SCORINGS[name](captured, model, sample, seed).to(torch.float64)


def best(scores: torch.Tensor, count: int) -> list[int]:
    """The ``count`` channels with the highest scores, in ascending order; of equals the first. Raises SpecError."""
    if not 1 <= count <= scores.numel():
        raise SpecError(f"keep {count}: the layer has {scores.numel()} channels")
    order = sorted(range(scores.numel()), key=lambda channel: -float(scores[channel]))
    return sorted(order[:count])


def magnitude(captured: Captured, _model: nn.Module, _sample: Sample, _seed: int) -> torch.Tensor:
    """The mean absolute value."""
    return captured.magnitude


def variance(captured: Captured, _model: nn.Module, _sample: Sample, _seed: int) -> torch.Tensor:
    """How far values stray from the mean that stands for a dropped channel: the squared error of dropping it."""
    return captured.variance


def separability(captured: Captured, _model: nn.Module, _sample: Sample, _seed: int) -> torch.Tensor:
    """The Jeffries-Matusita distance between two classes, mean over all pairs, 0 (alike) to 2 (apart).

    Each class' places are taken as normally distributed: 2 (1 - exp(-B)), B the Bhattacharyya distance of the two
    (Bruzzone et al. 1995). Needs two classes with two places each.
    """
    classes = sorted({label for label in captured.labels if label is not None})
    known = {name: [index for index, label in enumerate(captured.labels) if label == name] for name in classes}
    groups = [captured.rows[rows] for rows in known.values() if len(rows) > 1]
    if len(groups) < 2:
        raise InputMismatch("separability needs labels: at least two classes with two inputs each")
    means = [group.mean(0) for group in groups]
    spread = torch.stack([group.var(0) for group in groups])
    spread = spread.clamp(min=1e-12 * float(captured.rows.var()) + 1e-30)  # a class that never varies
    total = torch.zeros_like(captured.mean)
    pairs = list(combinations(range(len(groups)), 2))
    for a, b in pairs:
        both = spread[a] + spread[b]
        apart = (means[a] - means[b]).square() / both / 4 + (both / (2 * (spread[a] * spread[b]).sqrt())).log() / 2
        total += 2 * (1 - torch.exp(-apart))
    return total / len(pairs)


def clusters(captured: Captured, _model: nn.Module, _sample: Sample, _seed: int) -> torch.Tensor:
    """Channels that say the same form a cluster (k-medoids, k by silhouette); one of each goes before a second of any.

    Alike is who rises and falls together over the places (1 - |correlation|). The medoid is its cluster's first, then
    the others by variance; among firsts, and among seconds, the higher variance wins. A silent channel comes last.
    """
    needs_scikit()
    from scipy.spatial.distance import pdist, squareform

    silent = captured.rows.var(0, correction=0) <= 1e-24
    alive = (~silent).nonzero().flatten().tolist()
    scores = torch.zeros(captured.channels, dtype=torch.float64)
    if len(captured.rows) < 3:
        raise InputMismatch("clusters need three places or more")
    if len(alive) < 3:
        return captured.variance * ~silent
    distances = 1 - np.abs(1 - squareform(pdist(captured.rows[:, alive].numpy().T, "correlation")))
    distances = np.clip((distances + distances.T) / 2, 0, 1)
    np.fill_diagonal(distances, 0)
    medoids, members = by_silhouette(distances, MOST_CLUSTERS)
    strength = captured.variance[alive] / captured.variance[alive].max() / 2  # below 1: breaks ties within a rank
    for cluster, medoid in enumerate(medoids):
        others = [point for point, its in enumerate(members) if its == cluster and point != medoid]
        others.sort(key=lambda point: -float(strength[point]))
        for rank, point in enumerate([medoid, *others]):
            scores[alive[point]] = len(alive) - rank + strength[point]
    return scores


def weight(captured: Captured, model: nn.Module, sample: Sample, _seed: int) -> torch.Tensor:
    """The L1 norm of each channel's filter (Li et al. 2017), summed over the layers that add up to the channel."""
    found = _before(captured, model, sample, "makers", (*CONVOLUTIONS, nn.Linear))
    norms = [module.weight.detach().abs().flatten(1).sum(1) for module in found]  # type: ignore[operator]
    return _sum(norms, captured, "convolution or linear layer")


def gamma(captured: Captured, model: nn.Module, sample: Sample, _seed: int) -> torch.Tensor:
    """The absolute scale of the batch normalisation (Liu et al. 2017), summed as `weight` is."""
    found = _before(captured, model, sample, "carriers", NORMS)
    scales = [module.weight.detach().abs() for module in found if _scales(module)]  # type: ignore[operator]
    return _sum(scales, captured, "batch normalisation")


def random(captured: Captured, _model: nn.Module, _sample: Sample, seed: int) -> torch.Tensor:
    """The control: a permutation drawn from ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(captured.channels, generator=generator).to(torch.float64)


SCORINGS: Final[Mapping[str, Scoring]] = {
    "magnitude": magnitude,
    "variance": variance,
    "separability": separability,
    "clusters": clusters,
    "weight": weight,
    "gamma": gamma,
    "random": random,
}


def _before(
    captured: Captured, model: nn.Module, sample: Sample, role: str, kinds: tuple[type[nn.Module], ...]
) -> list[nn.Module]:
    """The modules of the layer's space in a role that have run when it has. The layer itself, if it is of ``kinds``,
    where the graph shows none: in tokens, and in models that torch.fx cannot follow.
    """
    own = dict(model.named_modules()).get(captured.layer.partition("#")[0])
    mine = [own] if isinstance(own, kinds) else []
    try:
        return [
            model.get_submodule(name) for name in getattr(trace(model, sample).before(captured.layer), role)
        ] or mine
    except CutRefused:
        if mine:
            return mine
        raise


def _scales(module: nn.Module) -> bool:
    return isinstance(module, NORMS) and bool(module.affine)


def _sum(scores: list[torch.Tensor], captured: Captured, what: str) -> torch.Tensor:
    scores = [one.to("cpu", torch.float64) for one in scores if one.numel() == captured.channels]
    if not scores:
        raise InputMismatch(f"layer {captured.layer}: no {what} of {captured.channels} channels before it")
    return torch.stack(scores).sum(0)
