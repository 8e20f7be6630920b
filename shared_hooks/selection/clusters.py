"""k-medoids (partitioning around medoids, Kaufman & Rousseeuw 1990): every cluster is stood for by one of its own."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shared_hooks.errors import SpecError

Array = npt.NDArray[np.float64]


def needs_scikit() -> None:
    """SpecError where scikit-learn and scipy, the extra "prune", are not installed."""
    try:
        import scipy
        import sklearn  # noqa: F401
    except ImportError as error:
        raise SpecError(f'{error.name} missing: pip install "isthmus[prune]"') from error
    del scipy


def k_medoids(distances: Array, k: int) -> tuple[list[int], list[int]]:
    """(medoids, cluster of each point) for a symmetric (n, n) matrix: greedy build, then swaps while one helps.

    Deterministic. Each swap lowers the sum of the distances to the nearest medoid, so it ends.
    """
    n = len(distances)
    if not 1 <= k <= n:
        raise ValueError(f"k is 1 to {n}, not {k}")
    medoids: list[int] = []
    nearest = np.full(n, np.inf)
    for _ in range(k):
        costs = np.minimum(nearest, distances).sum(1)  # row: the candidate
        costs[medoids] = np.inf
        medoids.append(int(costs.argmin()))
        nearest = np.minimum(nearest, distances[medoids[-1]])
    while k < n:
        others = [point for point in range(n) if point not in medoids]
        best = (nearest.sum() * (1 - 1e-12), -1, -1)
        for position in range(k):
            rest = [medoid for medoid in medoids if medoid != medoids[position]]
            without = distances[rest].min(0) if rest else np.full(n, np.inf)
            costs = np.minimum(without, distances[others]).sum(1)
            if costs.min() < best[0]:
                best = (float(costs.min()), position, others[int(costs.argmin())])
        if best[1] < 0:
            break
        medoids[best[1]] = best[2]
        nearest = distances[medoids].min(0)
    clusters = distances[medoids].argmin(0)
    clusters[medoids] = range(k)  # points at distance zero of each other stay with their own medoid
    return medoids, clusters.tolist()


def by_silhouette(distances: Array, most: int) -> tuple[list[int], list[int]]:
    """`k_medoids` with the k from 2 to ``most`` whose mean silhouette is highest; k = 1 for fewer than three points."""
    needs_scikit()
    from sklearn.metrics import silhouette_score

    n = len(distances)
    best, found = -2.0, k_medoids(distances, 1)
    for k in range(2, min(most, n - 1) + 1):
        medoids, clusters = k_medoids(distances, k)
        score = float(silhouette_score(distances, clusters, metric="precomputed"))
        if score > best:
            best, found = score, (medoids, clusters)
    return found
