"""What requests did and took: a hook of the life cycle that counts where they end.

Names follow Triton's inference server (``nv_inference_request_success``), units and suffixes Prometheus's rules
(https://prometheus.io/docs/practices/naming/). No label has a value that a client chose: models are those that are
served, errors those of our own tree, bounds those of `cloud_server.limits` and of policies, identities what
credentials prove, and of these the first `MAX_IDENTITIES`.
"""

from __future__ import annotations

import re
import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any, Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from cloud_server.access import Policy
from cloud_server.limits import Limits
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import IsthmusError, QuotaExceeded
from shared_hooks.lifecycle import About, Event

# Durations and sizes counted in buckets: prometheus_client's own takes ten times as long to count one.

BUCKETS: Final = (
    *(1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0),
)
"""Seconds: three a decade, from 0.1 ms to 100 s."""
SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128)
"""Requests that were computed together."""


class Histogram:
    """Of what is counted in units, ``scale`` of which are one of ``bounds``. The caller locks."""

    __slots__ = ("_bounds", "_counts", "_names", "_scale", "_sum")

    def __init__(self, bounds: Sequence[float] = BUCKETS, scale: float = 1e9) -> None:
        """Of nanoseconds, in buckets of seconds."""
        self._bounds = tuple(round(bound * scale) for bound in bounds)
        self._names = (*map(str, bounds), "+Inf")
        self._counts = [0] * len(self._names)
        self._scale = scale
        self._sum = 0

    def add(self, units: int) -> None:
        self._counts[bisect_left(self._bounds, units)] += 1
        self._sum += units

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many were at most that), as Prometheus has it."""
        return list(zip(self._names, accumulate(self._counts), strict=True))

    @property
    def total(self) -> float:
        """All of them together."""
        return self._sum / self._scale


MAX_IDENTITIES: Final = 64
"""Of which each has lines of its own; the others share one."""
OTHERS: Final = "others"
UNKNOWN: Final = "unknown"

DURATIONS: Final = {
    "request": "First byte of a request to its answer.",
    "receive": "First byte of a request received to the last.",
    "queue": "Last byte received to the start of work: the wait for a worker.",
    "decode": "Bytes to tensors, or reading an input file.",
    "inject": "Placing the frontier: the model's own code, replayed up to the cut.",
    "compute": "The tail of the model.",
    "encode": "The output to bytes.",
}
_STATUS: Final = {number: name.lower() for name, number in split_pb2.Reading.Status.items()}
_LIMITS: Final = sorted({one.name for of in (Limits, Policy) for one in fields(of)})
_BOUND: Final = re.compile(rf"\b(?:{'|'.join(_LIMITS)})\b")


def bound(error: BaseException) -> str:
    """The limit that a refusal names; empty where it names none."""
    if isinstance(error, QuotaExceeded):
        return "per_minute"
    found = _BOUND.search(str(error)) if isinstance(error, IsthmusError) else None
    return found[0] if found else ""


@dataclass(eq=False, slots=True)
class _Account:
    """What one identity did with one model."""

    model: str
    identity: str
    success: int = 0
    received: int = 0
    sent: int = 0
    work_ns: int = 0
    failures: Counter[str] = field(default_factory=Counter)


class RequestCounts(Collector):
    """Mounted on a server's `Lifecycle`, and registered for collection. Any thread may call."""

    name = "metrics"
    built_in = True
    priority = "LOWEST"

    def __init__(self, models: Collection[str]) -> None:
        """``models``: those that are served, as they are at any time."""
        self._lock = threading.Lock()
        self._models = models
        self._times = {model: [Histogram() for _ in DURATIONS] for model in (*models, UNKNOWN)}
        self._sizes = {model: Histogram(SIZES, 1) for model in self._times}
        self._accounts: dict[tuple[str, str], _Account] = {}
        self._identities: set[str] = set()
        self._refusals: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()
        self._joules: defaultdict[tuple[str, str], float] = defaultdict(float)
        for model in models:  # a line of zeros says more than none
            self._account(About(0, 0, model_id=model))

    # Stages

    def after_request(self, event: Event) -> None:
        """It is answered, failed or cancelled."""
        reply: split_pb2.ReplyHeader | None = event.reply
        with self._lock:
            account = self._account(event.request)
            account.received += event.nbytes
            if event.error is not None or reply is None:
                account.failures[type(event.error).__name__] += 1
                return
            account.success += 1
            took = reply.durations
            work = took.decode_ns, took.inject_ns, took.compute_ns, took.encode_ns
            account.work_ns += sum(work)
            durations = time.perf_counter_ns() - event.began_ns, took.receive_ns, took.queue_ns, *work
            for histogram, ns in zip(self._times[account.model], durations, strict=True):
                histogram.add(ns)
            self._sizes[account.model].add(max(1, reply.company))
            if reply.forward.energy:
                joules = reply.readings[reply.forward.energy - 1]
                if joules.HasField("value"):
                    self._joules[account.model, _STATUS[joules.status]] += max(0.0, joules.value)

    def after_send(self, event: Event) -> None:
        """gRPC has an answer's last byte."""
        with self._lock:
            self._account(event.request).sent += event.nbytes

    def on_error(self, event: Event) -> None:
        """A request, a stream or a call failed."""
        met = bound(event.error)
        with self._lock:
            if met:
                self._refusals[met] += 1
            if event.request is None:
                self._streams[type(event.error).__name__] += 1
            elif event.request.index < 0:  # it was not taken in, so it does not end either
                self._account(event.request).failures[type(event.error).__name__] += 1

    def _account(self, about: About | None) -> _Account:
        """The caller locks."""
        model, identity = ("", "") if about is None else (about.model_id, about.identity)
        known = self._accounts.get((model, identity))
        if known is not None:
            return known
        if identity and identity not in self._identities:
            if len(self._identities) < MAX_IDENTITIES:
                self._identities.add(identity)
            else:
                identity = OTHERS
        if model not in self._times and model in self._models:  # loaded since
            self._times[model] = [Histogram() for _ in DURATIONS]
            self._sizes[model] = Histogram(SIZES, 1)
        key = (model if model in self._times else UNKNOWN, identity)
        return self._accounts.setdefault(key, _Account(*key))

    # What is collected

    def describe(self) -> list[Metric]:
        """None are foretold."""
        return []

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            return iter([*self._of_accounts(), *self._of_errors(), *self._of_times()])

    def _of_accounts(self) -> Iterator[Metric]:
        figures: tuple[tuple[str, str, Callable[[_Account], float]], ...] = (
            ("success", "Requests answered with a result.", lambda one: one.success),
            ("received_bytes", "Payload bytes received.", lambda one: one.received),
            ("sent_bytes", "Payload bytes of answers sent.", lambda one: one.sent),
            ("work_seconds", "Decode, inject, compute and encode together.", lambda one: one.work_ns / 1e9),
        )
        for name, text, value in figures:
            family = CounterMetricFamily(f"isthmus_request_{name}", text, labels=("model", "identity"))
            for one in self._accounts.values():
                family.add_metric((one.model, one.identity), value(one))
            yield family
        failure = CounterMetricFamily(
            "isthmus_request_failure", "Requests that ended otherwise.", labels=("model", "identity", "reason")
        )
        for one in self._accounts.values():
            for reason, count in one.failures.items():
                failure.add_metric((one.model, one.identity, reason), count)
        yield failure

    def _of_errors(self) -> Iterator[Metric]:
        figures: tuple[tuple[str, str, tuple[str, ...], Mapping[Any, float]], ...] = (
            ("refusals", "Requests, streams and calls refused, by the limit they met.", ("bound",), self._refusals),
            ("stream_failure", "Streams and calls that ended with an error.", ("reason",), self._streams),
            ("energy_joules", "Energy of tails, by how it was read.", ("model", "status"), self._joules),
        )
        for name, text, labels, counts in figures:
            family = CounterMetricFamily(f"isthmus_{name}", text, labels=labels)
            for key, count in counts.items():
                family.add_metric(key if isinstance(key, tuple) else (key,), count)
            yield family

    def _of_times(self) -> Iterator[Metric]:
        for number, (name, text) in enumerate(DURATIONS.items()):
            family = HistogramMetricFamily(f"isthmus_{name}_duration_seconds", text, labels=("model",))
            for model, times in self._times.items():
                if model != UNKNOWN:
                    family.add_metric((model,), times[number].buckets(), times[number].total)
            yield family
        family = HistogramMetricFamily(
            "isthmus_batch_size", "Requests or steps that were computed as one with an answered one.", labels=("model",)
        )
        for model, sizes in self._sizes.items():
            if model != UNKNOWN:
                family.add_metric((model,), sizes.buckets(), sizes.total)
        yield family
