"""Requests of several clients as one batch of a model in this process.

The engine decides what can be joined, and how (`shared_hooks.batching`); here a request is unpacked, measured and
packed as for any tail. Hooks see one request after the other: all before the batch is computed, and all after it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from cloud_server.models.engine import BatchKey, BegunTail, Computed, PartEnd, WeightsGuard, packed
from shared_hooks import Crossing, EarlyOutput
from shared_hooks.batching import BatchedResult, Batches, Joinable, Ways
from shared_hooks.errors import CutRefused, IsthmusError, ModelFailed, PlanMismatch
from shared_hooks.lifecycle import Lifecycle, Stage
from shared_hooks.tensors.staging import wait

log = logging.getLogger("cloud_server")

BATCH = "batch"
"""The first element of every batch key."""
Unpack = Callable[[Crossing, bytes, memoryview, PartEnd | None], tuple[EarlyOutput, int]]
"""Unpacks a payload: the frontier, and the nanoseconds that took."""
Alone = Callable[[EarlyOutput, int, bool, PartEnd | None], Computed]
"""Runs one request outside a batch, given its frontier, the nanoseconds spent unpacking it, whether to return metrics,
and the end of a middle part.
"""


class BatchedTails:
    """An `engine.Batching`. Thread-safe."""

    def __init__(
        self,
        batches: Batches,
        device: torch.device,
        guard: WeightsGuard,
        lifecycle: Lifecycle,
        unpack: Unpack,
        alone: Alone,
        reading: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """``reading``: a context around each examination of a cut, for which the whole model runs."""
        self.batches = batches
        self.ways = Ways(batches)
        self.lifecycle = lifecycle
        self.unpack = unpack
        self.alone = alone
        self._device = device
        self._guard = guard
        self._reading = reading

    def batch_key(self, crossing: Crossing, end: PartEnd | None = None) -> BatchKey | None:
        """As `Batching.batch_key`: a lookup."""
        found = self.batches.of(crossing, _name(end))
        if found is None:
            return None
        if end is None:
            self.ways.record(found)
        return BatchKey((BATCH, found.batch_key), found.rows)

    def compatible_keys(self, key: Hashable, waiting: Callable[[Hashable], int], most: int) -> list[Hashable]:
        """As `Batching.compatible_keys`: a lookup."""
        if not isinstance(key, tuple) or key[:1] != (BATCH,):
            return []
        return [
            (BATCH, batch_key)
            for batch_key in self.ways.compatible_keys(key[1], lambda batch_key: waiting((BATCH, batch_key)), most)
        ]

    def learn(self, crossing: Crossing, end: PartEnd | None = None) -> bool:
        """As `Batching.learn`. Costs about forty times a row once for each cut and form of inputs; about ten times for
        the way from there to a later cut.
        """
        try:
            with self._reading():
                looked = self.batches.learn(crossing, _name(end))
                if not looked and end is None and (known := self.batches.of(crossing)) is not None:
                    return self.ways.learn(known)
        finally:
            self._guard.mend()
        if looked and (reason := self.batches.reason(crossing, _name(end))):
            log.info("requests after %s are computed each alone: %s", crossing.layer_name, reason)
        return looked

    def begin(
        self, crossing: Crossing, header: bytes, payload: memoryview, want_metrics: bool, end: PartEnd | None = None
    ) -> BegunTail:
        """Unpack the request. Raises BadFrame, CutRefused."""
        return _Begun(self, crossing, header, payload, want_metrics, end)

    def run(self, begun: Sequence[BegunTail]) -> None:
        """Compute the batch, and check the model's memory once for all. Raises what `Batches.run` does, and ModelFailed
        with the model's error as cause.
        """
        parts = [one for one in begun if isinstance(one, _Begun)]
        if any(one.joinable is None for one in parts):
            raise CutRefused("what was known of this cut is not believed any more")
        started = time.perf_counter_ns()
        try:
            parts = self._at_one_cut(parts)
            joinable = [one.joinable for one in parts if one.joinable is not None]
            made = self.batches.run([one.brought for one in parts], joinable)
            wait(self._device)  # until here the kernels are only launched
        except IsthmusError:
            raise
        except Exception as error:
            raise ModelFailed(f"{type(error).__name__}: {error}") from error
        finally:
            self._guard.check()
        took = time.perf_counter_ns() - started
        for one, own in zip(parts, made, strict=True):
            one.made, one.took_ns = own, took

    def _at_one_cut(self, parts: list[_Begun]) -> list[_Begun]:
        """Return the requests that are at the latest cut, or have run on to it. The others are computed alone."""
        last = max((one.joinable for one in parts if one.joinable is not None), key=lambda one: one.position)
        found = []
        for one in parts:
            assert one.joinable is not None
            if one.joinable.batch_key != last.batch_key:
                way = self.ways.way(one.joinable, last.batch_key)
                if way is None:
                    continue
                started = time.perf_counter_ns()
                try:
                    one.brought = self.ways.run(way, one.early, one.joinable.rows, last.proof)
                except (CutRefused, PlanMismatch):
                    continue
                one.joinable = replace(last, rows=one.joinable.rows)
                one.own_ns = time.perf_counter_ns() - started
            found.append(one)
        return found

    def doubt(self, begun: BegunTail, reason: str) -> None:
        """Exclude the cut from batches until it is examined again."""
        assert isinstance(begun, _Begun)
        if begun.joinable is not None:
            self.batches.doubt(begun.joinable, reason)


def _name(end: PartEnd | None) -> str:
    return "" if end is None else end.cut


class _Begun:
    """A request of a batch."""

    def __init__(
        self,
        tails: BatchedTails,
        crossing: Crossing,
        header: bytes,
        payload: memoryview,
        want_metrics: bool,
        end: PartEnd | None,
    ) -> None:
        self.joinable: Joinable | None = tails.batches.of(crossing, _name(end))
        self.made: BatchedResult | None = None
        self.took_ns = 0
        self.own_ns = 0
        self._tails = tails
        self._want_metrics = want_metrics
        self._end = end
        self.early, self._decode_ns = tails.unpack(crossing, header, payload, end)
        self.brought = self.early
        """The frontier where the batch begins."""

    @property
    def is_made(self) -> bool:
        return self.made is not None

    def end(self) -> Computed:
        assert self.made is not None
        split, lifecycle, output = self.early.layer_name, self._tails.lifecycle, self.made.output
        # nothing was done for this request alone around which hooks could have been called
        lifecycle.emit(Stage.BEFORE_INJECT, split=split, early=self.early)
        lifecycle.emit(Stage.AFTER_INJECT, split=split)
        lifecycle.emit(Stage.BEFORE_TAIL, split=split)
        lifecycle.emit(Stage.AFTER_TAIL, split=split, output=output)
        return packed(
            lifecycle,
            output,
            self._end,
            decode_ns=self._decode_ns,
            compute_ns=self.took_ns,
            batch_size=self.made.batch_size,
        )

    def alone(self) -> Computed:
        return self._tails.alone(self.early, self._decode_ns, self._want_metrics, self._end)
