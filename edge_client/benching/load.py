"""Define what is sent, when and by which client, and the results; quantiles of them. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from edge_client.user_text import AUTO, CLOUD_FILE, CLOUD_ONLY, EDGE_ONLY, option
from shared_hooks.errors import SpecError, near

# One request and its outcome.


REFUSALS: Final = frozenset(
    {"QuotaExceeded", "AccessRefused", "NotAuthenticated", "HookRefused", "ObserverRefused", "TooLarge"}
)
CONNECTION: Final = frozenset(
    {"ServerUnavailable", "Disagreement", "UnknownModel", "AccessRefused", "NotAuthenticated"}
)
"""Errors that the next request would have, too."""
ABANDONED: Final = "abandoned"
"""In place of an error: the run ended while the request was in flight."""


@dataclass(frozen=True, slots=True)
class Shot:
    """A scheduled request. ``at``: its start in seconds from the beginning; indices of its cut, input and client."""

    number: int
    at: float
    cut: int
    input: int
    client: int


@dataclass(slots=True)
class Ended:
    """The result of a shot. ``late_ns``: how late the generator sent it. ``took_ns``: from its scheduled start to the
    whole answer, or to the error. ``error``: the exception's class name; empty for an answer.
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
        """Whether the server refused it rather than lost it: explicitly, or by deferring it for too long."""
        return self.error in REFUSALS or (self.error == "DeadlineExceeded" and self.put_offs > 0)

    def row(self) -> list[Any]:
        """Return JSON data."""
        return list(astuple(self))


# Sends the requests of one client.


Over = Callable[[Ended], None]
"""Callback for a shot's end, in any thread."""


class Lane(Protocol):
    """One client, with its own identity and stream."""

    def begin(self) -> None:
        """Connect, and make a request at each cut, so that plans and recipes exist. Raises what that raises."""

    def send(self, shot: Shot, intended: float, over: Over) -> None:
        """Start a request without waiting. ``intended``: its scheduled start (`time.monotonic`)."""

    def tick(self) -> None:
        """Give up requests that took too long; called a few times per second."""

    def close(self) -> None:
        """Cancel what is in flight."""


# When requests begin: at random (Poisson), evenly, or as a file says, independent of answers.


POISSON: Final = "poisson"
CONSTANT: Final = "constant"
KINDS: Final = (POISSON, CONSTANT)
MOST: Final = 5_000_000
"""Maximum requests of one rate, to bound memory."""


def arrivals(kind: str, rate: float, seconds: float, dice: np.random.Generator) -> np.ndarray:
    """Return arrival times in seconds, ascending, below ``seconds``; ``rate`` per second on average. Raises
    SpecError.
    """
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
    """Return the times in the file ``kind``, in seconds from the first; None if it is no file.

    One number per line, ascending; empty lines and those starting with # are skipped. Raises SpecError.
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
    """Stretch a trace to ``rate`` per second on average; None: unchanged."""
    return times if rate is None else times * (mean_rate(times) / rate)


def mean_rate(times: np.ndarray) -> float:
    """Return a trace's requests per second."""
    return float((len(times) - 1) / times[-1])


# The cut, input and client of each request: drawn by weight, equal for equal seeds.


INPUT: Final = "input"


@dataclass(frozen=True)
class Weighted:
    """A word with its share of all, 0 to 1."""

    word: str
    share: float


def weighted(what: str, text: str) -> tuple[Weighted, ...]:
    """Parse the weights of ``a=0.7,b=0.3``, or ``a,b`` for equal shares. ``what``: the option's name. Raises
    SpecError.
    """
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
    """Parse weighted cuts. Raises SpecError for one without a server or without a fixed cut."""
    found = weighted("split", text)
    for one in found:
        if one.word in (EDGE_ONLY, AUTO, CLOUD_FILE):
            raise SpecError(f"{option('split', text)}: {one.word} is no cut; name layers, or {INPUT}")
    return tuple(Weighted(INPUT if one.word == CLOUD_ONLY else one.word, one.share) for one in found)


def codecs_of(text: str, clients: int, known: Iterable[str], learnt: Container[str] = ()) -> list[str]:
    """Assign a codec to each client, in proportion to the shares; each codec has at least one client.

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
    while sum(counts) < clients:  # to the one furthest below its share
        counts[max(range(len(found)), key=lambda at: found[at].share * clients - counts[at])] += 1
    return [one.word for one, count in zip(found, counts, strict=True) for _ in range(count)]


def shots(
    times: np.ndarray, cuts: Sequence[Weighted], inputs: int, clients: int, dice: np.random.Generator
) -> list[Shot]:
    """Return a request for each of ``times``. Clients are random, so that with Poisson arrivals each has a Poisson
    stream.
    """
    count = len(times)
    drawn = dice.choice(len(cuts), size=count, p=[one.share for one in cuts])
    whose, which = dice.integers(clients, size=count), dice.integers(inputs, size=count)
    return [
        Shot(number, float(at), int(cut), int(one), int(client))
        for number, (at, cut, one, client) in enumerate(zip(times, drawn, which, whose, strict=True))
    ]


# Quantiles and their confidence intervals.
#
# Requests of a queue are not independent: a slow one makes the next slow. So the bootstrap resamples blocks of time
# with replacement, not requests; a run shorter than a few blocks has no interval.


STRETCHES: Final = 20
DRAWS: Final = 300
FEWEST: Final = 100
"""Minimum requests for an interval."""
CONFIDENCE: Final = 0.95
FEW_BEYOND: Final = 10
"""Samples beyond a quantile below which it is uncertain."""


@dataclass(frozen=True)
class Estimate:
    """An estimate. ``value`` in its unit, infinite if among requests without an answer; ``low`` to ``high``: with
    `CONFIDENCE`, None with too little data. ``spread``: standard deviation of the value's logarithm.
    """

    value: float
    low: float | None = None
    high: float | None = None
    spread: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        """Return JSON data, with None for infinity."""
        known = {"value": self.value, "low": self.low, "high": self.high, "spread": self.spread}
        return {name: one if one is not None and math.isfinite(one) else None for name, one in known.items()}


def quantile(values: np.ndarray, share: float) -> float:
    """Return the smallest value that ``share`` of all do not exceed; NaN for no values."""
    return float(np.quantile(values, share, method="inverted_cdf")) if len(values) else math.nan


def estimate(values: np.ndarray, figure: Callable[[np.ndarray], float], seed: int = 0) -> Estimate:
    """Estimate ``figure`` of ``values``, which are in the order of the requests' starts."""
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
