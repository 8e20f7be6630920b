"""Scores against direct computation, and what each is for: silent, redundant and telling channels planted."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shared_hooks.errors import CutRefused, InputMismatch, SpecError
from shared_hooks.selection import SCORINGS, Captured, Sample, best, capture, score
from shared_hooks.selection.channels import by_silhouette, k_medoids
from tests.shared_hooks.selection.networks import Branching, Chain, Residual, Tokens, samples, seeded


def made(rows: torch.Tensor, labels: list[str | None]) -> Captured:
    """As captured at places of one value each."""
    rows = rows.double()
    mean = rows.mean(0)
    return Captured("stem", 1, mean, mean, rows.abs().mean(0), rows.var(0, correction=0), rows, tuple(labels))


def of(name: str, captured: Captured, seed: int = 0) -> torch.Tensor:
    return score(name, captured, seeded(Residual()), samples(1)[0], seed)


def test_separability_is_the_jeffries_matusita_distance() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(50, 2, generator=generator), torch.randn(50, 2, generator=generator)
    b[:, 1] += 9
    found = of("separability", made(torch.cat([a, b]), ["a"] * 50 + ["b"] * 50))
    for channel in (0, 1):
        m, n, v, w = (
            float(f) for f in (*(x[:, channel].mean() for x in (a, b)), *(x[:, channel].var() for x in (a, b)))
        )
        apart = (m - n) ** 2 / (v + w) / 4 + math.log((v + w) / (2 * math.sqrt(v * w))) / 2
        assert float(found[channel]) == pytest.approx(2 * (1 - math.exp(-apart)), rel=1e-5)
    assert found[1] > 1.99 > 0.5 > found[0]


def test_separability_needs_classes() -> None:
    with pytest.raises(InputMismatch, match="two classes"):
        of("separability", made(torch.randn(4, 3), [None] * 4))
    silent = made(torch.zeros(6, 2), ["a", "b"] * 3)
    assert of("separability", silent).tolist() == [0, 0]


def test_clusters_keep_one_of_each_kind_first() -> None:
    generator = torch.Generator().manual_seed(2)
    kinds = torch.randn(200, 3, generator=generator)
    noise = 0.01 * torch.randn(200, 9, generator=generator)
    rows = kinds.repeat_interleave(3, 1) * torch.tensor([3.0, -3, 3, 2, 2, -2, 1, 1, 1]) + noise
    rows = torch.cat([rows, torch.zeros(200, 1)], 1)  # the last channel is silent
    scores = of("clusters", made(rows, [None] * 200))
    assert {channel // 3 for channel in best(scores, 3)} == {0, 1, 2}
    assert {channel // 3 for channel in best(scores, 6)} == {0, 1, 2}
    assert 9 not in best(scores, 9)
    # while variance takes three of the loudest kind
    assert best(of("variance", made(rows, [None] * 200)), 3) == [0, 1, 2]


@given(st.integers(2, 7), st.data())
def test_k_medoids_is_stable_and_near_the_best(n: int, data: st.DataObject) -> None:
    points = np.array(data.draw(st.lists(st.floats(-10, 10), min_size=n, max_size=n)))
    distances = np.abs(points[:, None] - points[None])
    k = data.draw(st.integers(1, n))
    medoids, clusters = k_medoids(distances, k)
    assert len(set(medoids)) == k and all(clusters[medoid] == index for index, medoid in enumerate(medoids))
    cost = distances[medoids].min(0).sum()
    for position in range(k):  # no swap helps
        for other in set(range(n)) - set(medoids):
            swapped = [*medoids[:position], other, *medoids[position + 1 :]]
            assert distances[swapped].min(0).sum() >= cost * (1 - 1e-9) - 1e-9
    if k == 1:
        assert cost == pytest.approx(min(distances[[one]].min(0).sum() for one in range(n)))


def test_silhouette_finds_the_number_of_clusters() -> None:
    points = np.array([0, 0.1, 0.2, 5, 5.1, 5.2, 9, 9.1])
    medoids, clusters = by_silhouette(np.abs(points[:, None] - points[None]), 6)
    assert len(medoids) == 3 and len(set(clusters[:3])) == len(set(clusters[3:6])) == len(set(clusters[6:])) == 1


def test_weights_and_gammas_are_those_before_the_layer() -> None:
    model = seeded(Chain())
    captured = capture(model, "relu", samples())
    sample = samples(1)[0]
    first, norm = model.first, model.norm
    torch.testing.assert_close(
        score("weight", captured, model, sample), first.weight.detach().abs().sum((1, 2, 3)).double()
    )  # type: ignore[operator,union-attr]
    torch.testing.assert_close(score("gamma", captured, model, sample), norm.weight.detach().abs().double())  # type: ignore[operator,union-attr]
    residual = seeded(Residual())
    stream = capture(residual, "stem", samples())
    expected = residual.stem.weight.detach().abs().sum((1, 2, 3)).double()  # type: ignore[operator,union-attr]
    torch.testing.assert_close(score("weight", stream, residual, sample), expected)  # not `outer`, which comes later
    with pytest.raises(InputMismatch, match="no batch normalisation"):
        score("gamma", stream, residual, sample)


def test_a_layers_own_weights_do_where_the_graph_does_not_show_it() -> None:
    """Python that looks at data, tokens, and what runs inside a module that torch.fx takes as one."""
    branching, tokens = seeded(Branching()), seeded(Tokens())
    encoder = seeded(nn.Sequential(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)))
    sequence = Sample((torch.randn(2, 5, 6),))
    cases = [(branching, "first", samples(1)[0]), (tokens, "embed", sequence), (encoder, "0.linear1", sequence)]
    for model, layer, sample in cases:
        captured = capture(model, layer, [sample])
        expected = model.get_submodule(layer).weight.detach().abs().flatten(1).sum(1).double()  # type: ignore[operator]
        torch.testing.assert_close(score("weight", captured, model, sample), expected)
        with pytest.raises((CutRefused, InputMismatch)):
            score("gamma", captured, model, sample)
    with pytest.raises(CutRefused, match=r"torch\.fx does not see the layer itself"):
        score("weight", capture(encoder, "0.norm1", [sequence]), encoder, sequence)


def test_random_is_the_seeds_own() -> None:
    captured = made(torch.randn(4, 16), [None] * 4)
    assert torch.equal(of("random", captured, 1), of("random", captured, 1))
    assert len({tuple(best(of("random", captured, seed), 8)) for seed in range(5)}) == 5


def test_every_scoring_scores_every_channel() -> None:
    model = seeded(Chain())
    captured = capture(model, "relu", samples())
    for name in SCORINGS:
        scores = score(name, captured, model, samples(1)[0])
        assert scores.shape == (8,) and scores.isfinite().all(), name
        assert all(set(best(scores, a)) <= set(best(scores, b)) for a, b in combinations(range(1, 9), 2))


def test_best_and_unknown_names() -> None:
    assert best(torch.tensor([1.0, 3.0, 3.0, 0.0]), 2) == [1, 2] and best(torch.zeros(3), 2) == [0, 1]
    for count in (0, 5):
        with pytest.raises(SpecError, match="the layer has 4 channels"):
            best(torch.zeros(4), count)
    with pytest.raises(SpecError, match='no scoring "varience".*Did you mean variance'):
        of("varience", made(torch.randn(4, 3), [None] * 4))
