"""Feed `edge-client run` with the source that --input names, and track the run's position in it."""

from __future__ import annotations

import argparse
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias

from edge_client.model_choice import ModelChoice
from edge_client.screen import milliseconds
from edge_client.sources import Files, Item, Source, SourceTally, open_source
from edge_client.user_input import cut_for as cut_for
from edge_client.user_input import cut_of as cut_of
from edge_client.user_input import example_of as example_of
from edge_client.user_input import find as find
from edge_client.user_input import first_readable as first_readable
from edge_client.user_input import load as load
from edge_client.user_text import CLOUD_FILE
from shared_hooks.errors import InputMismatch, SpecError
from shared_hooks.models import Frame, FrameId, InputItem

Named: TypeAlias = InputItem | FrameId
"""An input without its content, for later reports."""


class Feed:
    """A source's inputs for one `infer_many`, at most ``most`` (None: all); `close` closes the source."""

    def __init__(self, source: Source, most: int | None = None) -> None:
        self.source = source
        self.most = most
        self.items: list[InputItem] | None = source.items if isinstance(source, Files) else None
        """All of them if they are files, known in advance; may be reduced before the run."""
        self._places = {id(item): number for number, item in enumerate(self.items or (), 1)}
        self.under_way: deque[Named] = deque()
        """Taken, and not yet answered."""
        self.tally = SourceTally(source)
        self._done = 0

    @property
    def samples(self) -> Sequence[Item]:
        """What can be planned in advance: all files, or the first frame."""
        return [self.source.first()] if self.items is None else self.items

    @property
    def broken(self) -> Sequence[InputMismatch]:
        """Why the source ended early, or several of them."""
        return self.source.broken

    @property
    def live(self) -> bool:
        """Whether the source is live."""
        return self.source.live

    def wait_for_input(self, seconds: float) -> bool:
        """Wait for the source's next input."""
        return self.source.wait_for_input(seconds)

    def __iter__(self) -> Iterator[Item]:
        """Yield inputs. Ends if the source fails, too: `broken` gives the reason."""
        with suppress(InputMismatch):
            for number, item in enumerate(self.source if self.items is None else self.items, 1):
                self.under_way.append(item.id if isinstance(item, Frame) else item)
                yield item
                if number == self.most:
                    return

    def __len__(self) -> int:
        """Return the number of files; raises TypeError for frames, whose number is unknown."""
        if self.items is None:
            raise TypeError("frames have no length")
        return len(self.items)

    def next_done(self) -> Named:
        """Return the input whose answer has arrived."""
        self._done += 1
        return self.under_way.popleft()

    def place(self, named: Named) -> int:
        """Return an answered input's number among all given, from 1: the same if only some are run again."""
        return self._places.get(id(named), self._done)

    def unanswered(self) -> list[Named]:
        """Return the inputs without an answer; of files, also those not started."""
        return list(self.under_way) if self.items is None else list(self.items[self._done :])

    def close(self) -> None:
        """Close the source."""
        self.source.close()


def feed_of(options: argparse.Namespace) -> Feed:
    """Open what --input names. Raises SpecError for invalid options or combinations."""
    try:
        source = open_source(
            options.input,
            size=options.camera_size,
            rate=options.camera_rate,
            pixel_format=options.camera_format,
            queue=options.queue,
        )
    except InputMismatch as error:
        raise SpecError(f"--input: {error}") from error
    feed = Feed(source, options.frames)
    if feed.items is not None and options.frames is not None:
        raise SpecError("--frames is for a video or a camera; these inputs are files")
    if feed.items is None and options.split == CLOUD_FILE:
        source.close()
        raise SpecError(f"--split {CLOUD_FILE} sends input files; frames are none: --split cloud-only sends them")
    if feed.items is None and options.journal:
        source.close()
        raise SpecError("--journal keeps what became of input files; frames are none")
    return feed


# How long a run's requests took and how many per second were answered, the first one apart.


KEPT: Final = 100_000
"""Number of latencies kept, the last ones: 0.8 MB."""


class RunRate:
    """The rate of one run with up to ``in_flight`` concurrent requests, after ``warmup`` that are not counted at all.

    The first request makes plans, recipes and caches on both sides and is often by far the slowest; without a warm-up
    it is reported separately, and counts neither for latency nor for throughput.
    """

    def __init__(self, in_flight: int = 1, warmup: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.in_flight, self.warmup = in_flight, warmup
        self.first_ns: int | None = None
        self._clock = clock
        self._latencies: deque[int] = deque(maxlen=KEPT)
        self._count = 0
        self._since: float | None = None if not warmup else clock()
        self._last = 0.0

    def start(self) -> None:
        """Start the run."""
        if self.warmup:
            self._since = self._clock()

    def add(self, latency_ns: int) -> bool:
        """Add an answer; return False for the one that is reported separately."""
        now = self._clock()
        if self._since is None:
            self.first_ns, self._since = latency_ns, now
            return False
        self._latencies.append(latency_ns)
        self._count += 1
        self._last = now
        return True

    @property
    def per_second(self) -> float | None:
        """Answers per second; None if there were none but the first."""
        if self._since is None or not self._count or self._last <= self._since:
            return None
        return self._count / (self._last - self._since)

    def quantile_ns(self, share: float) -> int | None:
        """Return the latency within which this share of the requests was answered."""
        ordered = sorted(self._latencies)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None

    def lines(self) -> list[str]:
        """Format for people."""
        reported = []
        if self.first_ns is not None:
            apart = "; it makes plans and caches, and is left out below" if self._count else ""
            reported.append(f"first request {milliseconds(self.first_ns)} ms{apart}")
        median, most = self.quantile_ns(0.5), self.quantile_ns(0.9)
        if median is not None and most is not None:
            how = "one at a time" if self.in_flight == 1 else f"up to {self.in_flight} in flight"
            count = f"{self._count} request{'' if self._count == 1 else 's'}"
            reported.append(
                f"latency: median {milliseconds(median)} ms, 90 % within {milliseconds(most)} ms ({count}, {how})"
            )
        if self.in_flight > 1 and self.per_second is not None:
            reported.append(
                f"throughput: {self.per_second:.1f} requests a second with up to {self.in_flight} in flight"
            )
        return reported

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data; times in nanoseconds."""
        return {
            "in_flight": self.in_flight,
            "warmup": self.warmup,
            "first_ns": self.first_ns,
            "requests": self._count,
            "median_ns": self.quantile_ns(0.5),
            "p90_ns": self.quantile_ns(0.9),
            "p99_ns": self.quantile_ns(0.99),
            "per_second": self.per_second,
        }


# The model's choice from the command line, built by `edge_client.survey`.


def choice_of(options: argparse.Namespace) -> ModelChoice:
    """Return the model of --model, --weights, --selection, --example, --depth, --device, --threads and --only-head."""

    return ModelChoice(
        options.model,
        weights=tuple(options.weights or ()),
        selection=options.selection,
        example=options.example,
        depth=options.depth,
        device=options.device,
        threads=options.threads,
        only_head=getattr(options, "only_head", None),  # an option of run
    )
