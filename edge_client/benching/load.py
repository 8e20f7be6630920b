"""What is sent, when, by whom, and what became of it; quantiles of that. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from edge_client.spoken import AUTO, CLOUD_FILE, CLOUD_ONLY, EDGE_ONLY, option
from shared_hooks.errors import SpecError, near

# One request, and what became of it.


REFUSALS: Final = frozenset(
    {"QuotaExceeded", "AccessRefused", "NotAuthenticated", "HookRefused", "ObserverRefused", "TooLarge"}
)
CONNECTION: Final = frozenset(
    {"ServerUnavailable", "Disagreement", "UnknownModel", "AccessRefused", "NotAuthenticated"}
)
"""Errors that the next request would have, too."""
ABANDONED: Final = "abandoned"
"""In place of an error: the run was ended while it was under way."""


@dataclass(frozen=True, slots=True)
class Shot:
    """``at``: seconds from the beginning at which it is to begin; places of its cut, its input and its client."""

    number: int
    at: float
    cut: int
    input: int
    client: int


@dataclass(slots=True)
class Ended:
    """How a shot ended. ``late_ns``: after its time, when the generator sent it. ``took_ns``: from the time at which it
    was to begin to the whole answer, or to the error. ``error``: a class's name; empty for an answer.
    """

    number: int
    late_ns: int
    took_ns: int
    error: str = ""
    put_offs: int = 0
    bytes_up: int = 0
    pending: int = -1
    workers: int = 0
    queue_ns: int = 0
    batch_size: int = 1

    @property
    def refused(self) -> bool:
        """Whether the server would not have it, rather than lost it: by name, or put off until it was too late."""
        return self.error in REFUSALS or (self.error == "DeadlineExceeded" and self.put_offs > 0)

    def row(self) -> list[Any]:
        """For JSON."""
        return list(astuple(self))


# What sends the requests of one client.


Over = Callable[[Ended], None]
"""Hears how a shot ended, in whatever thread that was."""


class Lane(Protocol):
    """One client: an identity and a stream of its own."""

    def begin(self) -> None:
        """Connects, and asks at each cut once, so that plans and recipes are made. Raises what that raises."""

    def send(self, shot: Shot, intended: float, over: Over) -> None:
        """Begins a request and does not wait. ``intended``: `time.monotonic` at which it was to begin."""

    def tick(self) -> None:
        """Gives up what has taken too long; called a few times a second."""

    def close(self) -> None:
        """Ends what is under way."""


# When requests begin: by chance (Poisson), evenly, or as a file says. Nothing of it waits for an answer.


POISSON: Final = "poisson"
CONSTANT: Final = "constant"
KINDS: Final = (POISSON, CONSTANT)
MOST: Final = 5_000_000
"""Requests of one rate: beyond, what is kept of each would fill this machine's memory."""


def arrivals(kind: str, rate: float, seconds: float, dice: np.random.Generator) -> np.ndarray:
    """Seconds from the beginning, ascending, all below ``seconds``; ``rate`` a second on the mean. Raises SpecError."""
    if rate * seconds > MOST:
        raise SpecError(
            f"{option('rate', rate)} for {seconds:g} s: {rate * seconds:.0f} requests; {MOST} at most can be kept"
        )
    if kind == CONSTANT:
        return np.arange(math.ceil(rate * seconds)) / rate
    expected = rate * seconds
    gaps = dice.exponential(1 / rate, size=int(expected + 10 * math.sqrt(expected) + 20))
    times = np.cumsum(gaps)
    return times[times < seconds]


def trace(kind: str) -> np.ndarray | None:
    """The times in the file ``kind``, in seconds from its first; None for a kind that is no file.

    A number a line, ascending; empty lines and those that begin with # are left out. Raises SpecError.
    """
    if kind in KINDS:
        return None
    path, given = Path(kind), option("arrivals", kind)
    if not path.is_file():
        raise SpecError(f"{given}: must be {', '.join(KINDS)}, or a file of times in seconds.{near(kind, KINDS)}")
    times: list[float] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise SpecError(f"{given}: cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not (text := line.strip()) or text.startswith("#"):
            continue
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or (times and value < times[-1]):
            raise SpecError(f"{given}: line {number}: {text[:40]!r} is no time in seconds, or before the one above it")
        times.append(value)
    if len(times) < 2 or times[-1] == times[0]:
        raise SpecError(f"{given}: holds {len(times)} times; two that differ are the least")
    if len(times) > MOST:
        raise SpecError(f"{given}: holds {len(times)} times; {MOST} at most can be kept")
    return np.asarray(times) - times[0]


def at_rate(times: np.ndarray, rate: float | None) -> np.ndarray:
    """A trace stretched to ``rate`` a second on the mean; as it is for None."""
    return times if rate is None else times * (mean_rate(times) / rate)


def mean_rate(times: np.ndarray) -> float:
    """Requests a second of a trace."""
    return float((len(times) - 1) / times[-1])


# Which cut, input and client each request has: drawn by weights, the same for the same seed.


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


def codecs_of(text: str, clients: int, known: Iterable[str], learnt: Container[str] = ()) -> list[str]:
    """The codec of each client: every one has one, as many clients as its share says, and one at least.

    Raises SpecError for a codec that is not ``known`` or needs a calibration, and for more codecs than clients.
    """
    found = weighted("codec", text)
    for one in found:
        if one.word not in known:
            listed = f"{', '.join(known)}.{near(one.word, known)}"
            raise SpecError(f'{option("codec", text)}: "{one.word}" is not one of {listed}')
        if one.word in learnt:
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


# Quantiles, and how far they may be off.
#
# Requests of a queue are not independent: one that is slow makes the next slow. So the bootstrap draws whole
# stretches of time with replacement, not requests; and what is shorter than a few stretches has no interval at all.


STRETCHES: Final = 20
DRAWS: Final = 300
FEWEST: Final = 100
"""Requests below which nothing is said of an interval."""
CONFIDENCE: Final = 0.95
FEW_BEYOND: Final = 10
"""Samples beyond a quantile below which it is hardly known."""


@dataclass(frozen=True)
class Estimate:
    """``value`` in its unit, infinite where it lies among requests without an answer; ``low`` to ``high``: with
    `CONFIDENCE`, None where too little is known. ``spread``: standard deviation of the value's logarithm.
    """

    value: float
    low: float | None = None
    high: float | None = None
    spread: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        """For JSON, which has no infinity: None."""
        known = {"value": self.value, "low": self.low, "high": self.high, "spread": self.spread}
        return {name: one if one is not None and math.isfinite(one) else None for name, one in known.items()}


def quantile(values: np.ndarray, share: float) -> float:
    """The smallest value that ``share`` of all do not exceed; NaN of nothing."""
    return float(np.quantile(values, share, method="inverted_cdf")) if len(values) else math.nan


def estimate(values: np.ndarray, figure: Callable[[np.ndarray], float], seed: int = 0) -> Estimate:
    """``figure`` of ``values``, which are in the order in which the requests began."""
    value = figure(values) if len(values) else math.nan
    if len(values) < FEWEST:
        return Estimate(value)
    dice = np.random.default_rng(seed)
    stretches = np.array_split(values, STRETCHES)
    drawn = np.array(
        [
            figure(np.concatenate([stretches[at] for at in dice.integers(STRETCHES, size=STRETCHES)]))
            for _ in range(DRAWS)
        ]
    )
    edges = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], method="inverted_cdf")
    known = drawn[np.isfinite(drawn) & (drawn > 0)]
    spread = float(np.std(np.log(known))) if len(known) == DRAWS else None
    return Estimate(value, float(edges[0]), float(edges[1]), spread)
