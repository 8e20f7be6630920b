"""A model's batches: which requests may join, verified when the first of a kind comes, and one tail for those
that do.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from shared_hooks.batching.family import Family, Rows, check_plan, order_of
from shared_hooks.batching.proof import Doubt, Proof, agree
from shared_hooks.crossing import Crossing, EarlyOutput
from shared_hooks.errors import CutRefused, InputMismatch, IsthmusError, ServerUnavailable, TooLarge
from shared_hooks.forward import context
from shared_hooks.modules import INPUT, attach, holder_modules
from shared_hooks.planning import Plan
from shared_hooks.sharing import SharedCache
from shared_hooks.tail import payer
from shared_hooks.tensors import classes_of, dtype_name, flatten, unflatten
from shared_hooks.tensors.staging import wait
from shared_hooks.wrapped import WrappedModel

log = logging.getLogger("cloud_server")

_numbers = itertools.count()
"""Numbers of proofs, over all models."""
AXES = (0, 1)
"""Dimensions of the inputs that are tried; the first that succeeds counts: rows, or a sequence's tokens."""
MAX_FAMILIES = 16
MAX_PROOFS = 128
MAX_PROOF_BYTES = 256 << 20
MAX_DIGESTS = 4096
SPOT = 64
"""In one batch of this many, one part is also computed alone."""


class CutKey(NamedTuple):
    """Identifies a cut: the ``layer_id`` of the last layer before it, its ``name``, the ``calls`` of a cut along
    branches, and the later cut ``end`` of a middle part, empty for a tail.
    """

    layer_id: int
    name: str
    calls: tuple[str, ...] = ()
    end: str = ""


@dataclass(frozen=True)
class Joinable:
    """A cut whose requests may join others with an equal ``batch_key``; each has ``rows``. Cuts of one ``form`` have
    inputs that differ only in their rows.
    """

    batch_key: int
    rows: int
    proof: Proof
    form: Hashable

    @property
    def position(self) -> int:
        """Where the cut lies in the trace: later cuts have larger positions."""
        return self.proof.cut.position


@dataclass(frozen=True)
class _BatchKey:
    """The batch key of a known cut: where its proof is kept, and its rows."""

    key: tuple[Hashable, CutKey | None]
    rows: int


@dataclass(frozen=True)
class BatchedResult:
    """The result of one request of a batch: its output, or what crosses the later cut of a middle part. Outputs of one
    batch may share memory.
    """

    output: Any
    batch_size: int


class Batches:
    """The batches of one model. Thread-safe; one thread at a time verifies."""

    def __init__(
        self,
        wrapped: WrappedModel,
        example: Callable[[], tuple[tuple[Any, ...], dict[str, Any]] | None] = lambda: None,
        *,
        max_bytes: int = 256 << 20,
        seconds_a_minute: float = 20.0,
    ) -> None:
        """``example`` returns inputs of the model, whose values show what inputs may hold. ``seconds_a_minute``: the
        time for proofs within any minute; one `payer` may use half of it.
        """
        self._served = wrapped
        self._example = example
        self._example_plan: Plan | None = None
        self._find = classes_of(holder_modules(wrapped.model))
        self._families: SharedCache[Hashable, Family | Doubt] = SharedCache(MAX_FAMILIES, math.inf)
        self._proofs: SharedCache[Hashable, tuple[int, Proof] | Doubt] = SharedCache(MAX_PROOFS, MAX_PROOF_BYTES)
        self._known: OrderedDict[tuple[str, str], _BatchKey | Doubt] = OrderedDict()
        """By the digest of a crossing, and the later cut."""
        self._max_bytes = max_bytes
        self._seconds = seconds_a_minute
        self._spent: deque[tuple[float, float, str]] = deque()
        self._lock = threading.Lock()
        self._proving = threading.RLock()
        self._made = 0
        self.spot_checks = 0
        """The number of batches of which a part was also computed alone."""
        self.ended = ""
        """Why no batches are made any more; empty while they are."""

    @cached_property
    def wrapped(self) -> WrappedModel:
        """Runs the batches, without the hooks of those who serve requests."""
        return self._served.beside()

    def of(self, crossing: Crossing, end: str = "") -> Joinable | None:
        """Return what is known of this cut, for tails or for middle parts up to the cut ``end``; a quick lookup.

        None if nothing is known, or its requests are computed alone.
        """
        found = None if self.ended else self._look_up(crossing, end)
        return found if isinstance(found, Joinable) else None

    def reason(self, crossing: Crossing, end: str = "") -> str:
        """Return why requests at this cut are not joined; empty if they are, or if that is unknown."""
        found = self._look_up(crossing, end)
        return found.reason if isinstance(found, Doubt) else ""

    def _look_up(self, crossing: Crossing, end: str) -> Joinable | Doubt | None:
        with self._lock:
            found = self._known.get((crossing.digest, end))
            if isinstance(found, _BatchKey):
                kept = self._proofs.get(found.key, payer.get())
                if kept is None or isinstance(kept, Doubt):
                    return None
                number, proof = kept
                if proof.doubt is None or proof.doubt.is_over:
                    return Joinable(number, found.rows, proof, found.key[0])
                found = proof.doubt
            return None if found is None or found.is_over else found

    def learn(self, crossing: Crossing, end: str = "") -> bool:
        """Verify this cut, unless it is known, or there is no time now; returns whether it did.

        Plans and runs the model in this thread, some forty times the work of a row.
        """
        if self.ended or self._look_up(crossing, end) is not None or not self._proving.acquire(blocking=False):
            return False
        try:
            looks = self._look_up(crossing, end) is None and self._has_time()
            if looks:
                self._look_at(crossing, end)
            return looks
        finally:
            self._proving.release()

    def doubt(self, joinable: Joinable, reason: str) -> None:
        """Called if a batch failed although no part failed alone: its requests are computed alone for a while."""
        joinable.proof.doubt = Doubt(reason)

    def run(self, earlies: Sequence[EarlyOutput], joinable: Sequence[Joinable]) -> list[BatchedResult]:
        """Return the model's outputs for several frontiers of one batch key, from one tail, or a few if one would be
        too large; of middle parts what crosses the later cut.

        Raises CutRefused, InputMismatch if they cannot be joined, and what a tail raises; then none is computed.
        """
        proof, rows = joinable[0].proof, [one.rows for one in joinable]
        if len({one.batch_key for one in joinable}) > 1:
            raise InputMismatch("frontiers of several cuts, or forms of inputs, are no batch")
        if len(earlies) == 1:
            return [BatchedResult(self.wrapped.forward(earlies[0], end=proof.last.cut if proof.last else None), 1)]
        if self._is_watched:
            raise CutRefused("modules are observed, and observers would be shown several requests at once")
        self._try(joinable[0], sum(rows))
        if sum(rows) > proof.most:
            half = len(rows) // 2
            return [*self.run(earlies[:half], joinable[:half]), *self.run(earlies[half:], joinable[half:])]
        started = time.perf_counter()
        structure, tensors = proof.output(proof.joined(earlies, rows), sum(rows))
        wait(self.wrapped.device)
        proof.seconds.add(sum(rows), time.perf_counter() - started)
        if structure != proof.structure:
            raise CutRefused("the batch gave another form of output than the rows alone")
        parts = proof.apart(tensors, rows)
        self._spot_check(proof, earlies, rows, parts)
        if proof.last is None:
            return [BatchedResult(unflatten(structure, own, self._find), len(rows)) for own in parts]
        targets = [self.wrapped.crossing_at(early, proof.last.cut) for early in earlies]
        crossed = map(proof.crossing, parts, rows, targets)
        return [BatchedResult(one, len(rows)) for one in crossed]

    def _spot_check(
        self, proof: Proof, earlies: Sequence[EarlyOutput], rows: Sequence[int], own: Sequence[list[torch.Tensor]]
    ) -> None:
        """Check one batch in `SPOT` by also computing one part alone. Raises CutRefused if the results differ by more
        than rounding: this batch is computed again, each part alone, and no other is made for this model.
        """
        if self.ended:
            raise CutRefused(self.ended)
        self._made += 1
        if self._made % SPOT:
            return
        self.spot_checks += 1
        number = self.spot_checks % len(earlies)
        alone = proof.output(earlies[number], rows[number])[1]
        if len(alone) != len(own[number]) or not all(map(agree, own[number], alone)):
            self.ended = "rows of a batch were other than alone, though its proof held: this model takes no batches"
            log.error("%s", self.ended)
            raise CutRefused(self.ended)

    def close(self) -> None:
        """Restore the model; nothing may run afterwards."""
        if "wrapped" in self.__dict__:
            self.wrapped.detach()

    def _try(self, joinable: Joinable, rows: int) -> None:
        """Try a new number of rows on random data. Raises CutRefused if the result differs from that of rows alone."""
        proof = joinable.proof
        if rows > proof.most or proof.knows(rows):
            return
        if not self._proving.acquire(blocking=False):
            raise CutRefused("another batch is being proven")
        try:
            if proof.cut.at(rows).storage_bytes > self._max_bytes:
                raise TooLarge(f"{rows} rows' frontiers take more than {self._max_bytes} bytes")
            proof.check(rows)
        except TooLarge:
            proof.most = rows - 1
        except ServerUnavailable as error:  # this client's quota for rehearsals is used up: others have their own
            raise CutRefused(str(error)) from error
        except IsthmusError as error:
            self.doubt(joinable, str(error))
            raise CutRefused(f"a batch of {rows} rows: {error}") from error
        finally:
            self._proving.release()

    @property
    def _is_watched(self) -> bool:
        shims = map(attach.shim_of, self.wrapped.modules)
        return any(shim is not None and shim.watching for shim in shims)

    def _has_time(self) -> bool:
        now = time.monotonic()
        while self._spent and self._spent[0][0] < now - 60:
            self._spent.popleft()
        own = sum(seconds for _, seconds, who in self._spent if who == payer.get().account)
        return sum(seconds for _, seconds, _ in self._spent) < self._seconds and own < self._seconds / 2

    def _look_at(self, crossing: Crossing, end: str) -> None:
        started = time.monotonic()
        found: _BatchKey | Doubt | None = Doubt("finding out took too long")
        try:
            with self.wrapped.turn(), context.restored(crossing.context):
                found = self._found(crossing, end)
        except ServerUnavailable:
            found = None
        finally:  # also when the caller's deadline passes
            self._spent.append((time.monotonic(), time.monotonic() - started, payer.get().account))
            if found is not None:
                self._remember((crossing.digest, end), found)

    def _remember(self, key: tuple[str, str], found: _BatchKey | Doubt) -> None:
        with self._lock:
            self._known[key] = found
            self._known.move_to_end(key)
            while len(self._known) > MAX_DIGESTS:
                self._known.popitem(last=False)

    def _found(self, crossing: Crossing, end: str) -> _BatchKey | Doubt:
        reasons = []
        try:
            context.check(crossing.context, self.wrapped.modules, {})
            for rows in self._by_promise(crossing):
                try:
                    calls = crossing.calls if crossing.later else ()
                    cut = CutKey(crossing.layer_id, crossing.layer_name, calls, end)
                    proof = self._proof(crossing, rows, cut)
                    if proof.cut.is_at(crossing, rows.count):
                        if end:  # looked up again when a batch is taken apart
                            self.wrapped.crossing_at(EarlyOutput(crossing, (), ()), end)
                        return _BatchKey(_key(crossing, rows, cut), rows.count)
                    reasons.append("this side's plans describe another cut")
                except CutRefused as error:
                    reasons.append(f"dimension {rows.axis}: {error}")
        except ServerUnavailable:
            raise
        except IsthmusError as error:
            reasons.append(str(error))
        return Doubt("; ".join(reasons) or "no dimension of the inputs could be that of a batch")

    def _by_promise(self, crossing: Crossing) -> list[Rows]:
        """Candidates for the rows' dimension: that of the model as a whole, if known; else wherever the tail accepts
        them. Behind a late cut the tokens of a sequence, too, may be independent of each other.
        """
        candidates = []
        for axis in AXES:
            with suppress(CutRefused):
                candidates.append(Rows(crossing.inputs, axis))
        for rows in candidates:
            with suppress(CutRefused):
                self._proof(crossing, rows, CutKey(-1, INPUT))
                return [rows]
        return candidates

    def _proof(self, crossing: Crossing, rows: Rows, cut: CutKey) -> Proof:
        """Return the proof of a cut. Raises CutRefused with the reason."""
        key = _key(crossing, rows, cut)
        kept = self._kept(self._proofs, key)
        if kept is None:
            form = _key(crossing, rows)
            family = self._kept(self._families, form)
            if family is None:
                family = self._make(self._families, form, lambda: self._family(crossing, rows), lambda made: 0)

            def prove() -> tuple[int, Proof]:
                place = cut.calls or family.plans[0].cut_at(cut.layer_id, cut.name)
                return next(_numbers), Proof(family, place, cut.end)

            kept = self._make(self._proofs, key, prove, lambda made: made[1].nbytes)
        proof: Proof = kept[1]
        return proof

    def _kept(self, cache: SharedCache[Hashable, Any], key: Hashable) -> Any:
        """Return a kept result; raises a kept refusal while it is valid."""
        with self._lock:
            found = cache.get(key, payer.get())
        if not isinstance(found, Doubt):
            return found
        if found.is_over:
            return None
        raise CutRefused(found.reason)

    def _make(
        self, cache: SharedCache[Hashable, Any], key: Hashable, make: Callable[[], Any], size: Callable[[Any], int]
    ) -> Any:
        """Make and keep a result, or the reason why it fails, which is raised."""
        try:
            made = make()
        except ServerUnavailable:  # not now, and for this client: the cut remains undecided
            raise
        except Exception as error:
            text = str(error) if isinstance(error, IsthmusError) else f"{type(error).__name__}: {error}"
            with self._lock:
                cache.put(key, Doubt(text), 0, payer.get())
            raise CutRefused(text) from error
        with self._lock:
            cache.put(key, made, size(made), payer.get())
        return made

    def _family(self, crossing: Crossing, rows: Rows) -> Family:
        example, like = self._example(), None
        if example is not None:
            if self._example_plan is None:  # inputs that the model is known to accept: on others it might never end
                self._example_plan = self.wrapped.plan(*example[0], **example[1])
            check_plan(self._example_plan)
            structure, tensors = flatten(example)
            dtypes = [tensor.dtype for tensor in tensors]
            alike = structure == crossing.input_structure and dtypes == [form.dtype for form in crossing.inputs]
            like = tensors if alike else None
        return Family(self.wrapped, crossing, rows, like, self._find)


def _key(crossing: Crossing, rows: Rows, cut: CutKey | None = None) -> tuple[Hashable, CutKey | None]:
    """Return what inputs share regardless of their rows; with a cut, that too."""
    forms = [
        [
            dtype_name(form.dtype),
            order_of(form),
            [-1 if grows and axis == rows.axis else size for axis, size in enumerate(form.shape)],
        ]
        for form, grows in zip(crossing.inputs, rows.batched, strict=True)
    ]
    around = {name: value for name, value in crossing.context.items() if name != "torch"}
    reported = json.dumps([crossing.depth, rows.axis, crossing.input_structure, forms, around], sort_keys=True)
    # the text is as long as a client chooses, and is kept for thousands of cuts
    return hashlib.blake2b(reported.encode(), digest_size=16).digest(), cut
