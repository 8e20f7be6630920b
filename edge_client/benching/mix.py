"""Which cut, input and client each request has: drawn by weights, the same for the same seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from edge_client.benching.shot import Shot
from edge_client.modes import AUTO, CLOUD_FILE, CLOUD_ONLY, EDGE_ONLY
from edge_client.planning.codecs import LEARNT
from edge_client.spoken import option
from shared_hooks.codecs import CODECS
from shared_hooks.errors import SpecError, near

INPUT: Final = "input"


@dataclass(frozen=True)
class Weighted:
    """A word, and its share of all: 0 to 1."""

    word: str
    share: float


def weighted(what: str, text: str) -> tuple[Weighted, ...]:
    """Weights of ``a=0.7,b=0.3``, or ``a,b`` for equal shares. ``what``: the option's name. Raises SpecError."""
    found: dict[str, float] = {}
    for part in text.split(","):
        word, mark, weight = (one.strip() for one in part.partition("="))
        try:
            value = float(weight) if mark else 1.0
        except ValueError:
            value = math.nan
        if not word or not 0 < value < math.inf:
            raise SpecError(f"{option(what, text)}: {part.strip()!r} is no NAME or NAME=WEIGHT with a weight above 0")
        if word in found:
            raise SpecError(f"{option(what, text)}: {word} is there twice")
        found[word] = value
    total = sum(found.values())
    return tuple(Weighted(word, value / total) for word, value in found.items())


def cuts_of(text: str) -> tuple[Weighted, ...]:
    """Cuts by weight. Raises SpecError for a word that asks no server, or for no cut of its own."""
    found = weighted("split", text)
    for one in found:
        if one.word in (EDGE_ONLY, AUTO, CLOUD_FILE):
            raise SpecError(f"{option('split', text)}: {one.word} is no cut; name layers, or {INPUT}")
    return tuple(Weighted(INPUT if one.word == CLOUD_ONLY else one.word, one.share) for one in found)


def codecs_of(text: str, clients: int) -> list[str]:
    """The codec of each client: every one has one, as many clients as its share says, and one at least.

    Raises SpecError for a codec that there is not or that needs a calibration, and for more codecs than clients.
    """
    found = weighted("codec", text)
    for one in found:
        if one.word not in CODECS:
            listed = f"{', '.join(CODECS)}.{near(one.word, CODECS)}"
            raise SpecError(f'{option("codec", text)}: "{one.word}" is not one of {listed}')
        if one.word in LEARNT:
            raise SpecError(f"{option('codec', text)}: {one.word} goes by a calibration, which a bench does not take")
    if len(found) > clients:
        raise SpecError(
            f"{option('codec', text)}: {len(found)} codecs for {clients} clients; each client has one codec"
        )
    counts = [1] * len(found)
    while sum(counts) < clients:  # to the one that is furthest below its share
        counts[max(range(len(found)), key=lambda at: found[at].share * clients - counts[at])] += 1
    return [one.word for one, count in zip(found, counts, strict=True) for _ in range(count)]


def shots(
    times: np.ndarray, cuts: Sequence[Weighted], inputs: int, clients: int, dice: np.random.Generator
) -> list[Shot]:
    """A request for each of ``times``. Clients by chance: of Poisson arrivals each gets such a stream of its own."""
    count = len(times)
    drawn = dice.choice(len(cuts), size=count, p=[one.share for one in cuts])
    whose, which = dice.integers(clients, size=count), dice.integers(inputs, size=count)
    return [
        Shot(number, float(at), int(cut), int(one), int(client))
        for number, (at, cut, one, client) in enumerate(zip(times, drawn, which, whose, strict=True))
    ]
