"""`AutoClient`: chooses the cut for every request, from what earlier requests took.

Each request asks the controller where to run, runs there, and reports what that took. In addition, a request that takes
much longer than predicted is *hedged*: the whole model also runs here, the first result is the answer, and the other is
dropped. If the server is gone this happens at once, and no request is lost. And a *monitor*
(`edge_client.adaptive.monitor`) probes the link when no request shows its speed, and contacts a server that is gone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

from torch.nn.modules.module import register_module_forward_pre_hook

from edge_client.adaptive.controller import ChosenWay, SplitController
from edge_client.adaptive.monitor import Connect, Decisions, ServerMonitor
from edge_client.answer import Answer, Failure
from edge_client.call import Call
from edge_client.choosing.chooser import UNKNOWN
from edge_client.core import ClientCore
from edge_client.model_choice import Inputs
from edge_client.planning.link import Link
from edge_client.planning.objective import Candidate
from edge_client.request import NOT_SERVED, Done, Position, Running, in_order
from edge_client.transport import Exchange, Stamps, State, now_ns
from edge_client.user_text import CLOUD_FILE, CLOUD_ONLY, EDGE_ONLY
from shared_hooks.errors import AccessRefused, Cancelled, CutRefused, SpecError
from shared_hooks.lifecycle import Stage
from shared_hooks.showing import summary_of

# The whole model run here beside a request that is late, and abandoned when that is answered after all.
#
# A forward is left between two modules: a global hook of torch, installed only while something runs, raises in the
# thread of the abandoned one.


SLACK: Final = 1.5
SLACK_NS: Final = 50_000_000
"""A request is hedged when it has taken this multiple of its prediction for network and server, and this much more."""


def expected_ns(candidate: Candidate) -> float:
    """Return the expected time from the end of a request's head to its answer."""
    return sum(candidate.stages_ns.get(stage, 0.0) for stage in ("network", "queue", "tail"))


def is_late(candidate: Candidate, waited_ns: float) -> bool:
    """Return whether the whole model should run here, too."""
    return waited_ns > SLACK * expected_ns(candidate) + SLACK_NS


class _Abandoned(BaseException):
    """Leaves the model; a BaseException, so that a model's own ``except Exception`` does not catch it."""


class Hedge:
    """Runs one function at a time, in its own thread."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="edge-hedge")
        self._unwanted: set[Future[Answer]] = set()
        self._lock = threading.Lock()
        self._closed = False

    def run(self, work: Callable[[], Answer]) -> Future[Answer]:
        """Run ``work()`` after what ran before is done or abandoned; Cancelled after `close`."""
        future: Future[Answer] = Future()
        with self._lock:
            if self._closed:  # while a request was in flight in another thread
                future.set_exception(Cancelled("closed"))
                return future
            queued = self._worker.submit(self._run, work, future)
        queued.add_done_callback(lambda one: future.set_exception(Cancelled("closed")) if one.cancelled() else None)
        return future

    def abandon(self, future: Future[Answer]) -> None:
        """Abandon it: it ends with Cancelled at its next module, or does not start."""
        self._unwanted.add(future)
        if future.done():  # it ended before it was abandoned, and would never be removed otherwise
            self._unwanted.discard(future)

    def close(self) -> None:
        """Wait until nothing runs; what has not started ends with Cancelled."""
        with self._lock:
            self._closed = True
        self._worker.shutdown(cancel_futures=True)

    def _run(self, work: Callable[[], Answer], future: Future[Answer]) -> None:
        mine = threading.get_ident()

        def check(*_: object) -> None:
            if threading.get_ident() == mine and future in self._unwanted:
                raise _Abandoned

        hook = register_module_forward_pre_hook(check)
        try:
            check()
            future.set_result(work())
        except (_Abandoned, CancelledError):
            future.set_exception(Cancelled("it was answered elsewhere first"))
        except BaseException as error:
            future.set_exception(error)
        finally:
            hook.remove()
            self._unwanted.discard(future)


log = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.02
HEDGED_SECONDS: Final = 0.005
WHOLE_THERE: Final = (CLOUD_ONLY, CLOUD_FILE)
"""The candidates' name for the cut "input": if its answers are wrong, so are those for files."""
FALL_BACK: Final = NOT_SERVED
"""Errors after which it is answered here instead, because no input is at fault."""


@dataclass(slots=True, eq=False)  # inputs are tensors, which `==` compares element by element
class Flight:
    """A request in progress: its input, where it was sent, and the prediction for it."""

    item: Any
    call: Call | None  # None: not read yet, because the file itself was sent
    choice: ChosenWay
    stamps: Stamps
    until: float
    running: Running | Done
    exact: bool | None = None  # None: as set on the client
    bytes_ahead: int = 0
    hedged: Future[Answer] | None = None

    @property
    def settled(self) -> bool:
        return self.running.settled


class AutoClient:
    """Chooses the split with ``controller``; ``client`` (with a server) runs the requests.

        with AutoClient(client, controller) as auto:
            answer = auto.infer(image)

    ``prepare`` turns an input file into ``(args, kwargs)``, as in `EdgeClient.infer_many`; it is required for files.
    ``local=False``: the whole model cannot run here, so requests wait for a server that is gone. ``connect`` measures
    what is missing if the server was not available at the start (see `ServerMonitor`). ``on_decision`` is called with
    every decision and event as a dictionary; `decisions` keeps them. The caller closes the client.
    """

    def __init__(
        self,
        client: ClientCore,
        controller: SplitController,
        *,
        prepare: Callable[[Any], Inputs] | None = None,
        local: bool = True,
        connect: Connect | None = None,
        on_decision: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        if client.server is None:
            raise SpecError("an AutoClient needs a server to choose: make its EdgeClient with one")
        if client.choice.only_head is not None:
            raise SpecError(
                "only_head leaves the tail's weights in their files, and an AutoClient may run the whole model"
            )
        self.client = client
        self.controller = controller
        self.lock = threading.Lock()
        """Held during every use of the controller."""
        self.decisions = Decisions(on_decision)
        self._prepare = prepare
        self._local = local
        self._hedge = Hedge()
        self._flying: list[Flight] = []
        self._last_finished = 0
        self._last_networked: str = "input"
        self._cut: str | None = None  # of the last request
        self._allowed: frozenset[str] | None = None  # the cuts that the controller knows to be allowed
        self._known_refused: set[str] = set()  # disabled cuts that the controller knows of
        self.monitor = ServerMonitor(client, controller, self.lock, self.decisions, connect)
        client.codec_link(self._link)

    def __repr__(self) -> str:
        held = self._cut or "nothing yet"
        return summary_of(self, f"server={self.client.server}", f"model={self.client.model_id}", f"last: {held}")

    def __enter__(self) -> AutoClient:
        self.monitor.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop its own threads."""
        self.monitor.stop()
        self._hedge.close()

    def infer(self, *args: Any, deadline: float | None = None, **kwargs: Any) -> Answer:
        """Like `EdgeClient.infer`. If the only argument is an input file (with ``prepare``), the file may be sent."""
        item: Any = args[0] if len(args) == 1 and not kwargs and self._is_file(args[0]) else Call(args, kwargs)
        return self.finish(self.begin(item, self.client.until(deadline)))

    def infer_many(
        self,
        inputs: Iterable[Any],
        *,
        prepare: Callable[[Any], Inputs] | None = None,
        deadline: float | None = None,
        failures: Literal["raise", "return"] = "raise",
    ) -> Iterator[Answer | Failure]:
        """Like `EdgeClient.infer_many`; only an error of an input, or of the model, is a failure."""
        self._prepare = prepare or self._prepare
        return in_order(
            inputs,
            self.client.max_in_flight,
            start=lambda item, position: self.begin(item, self.client.until(deadline), position),
            finish=self.finish,
            cancel=lambda flight: self.leave(flight, "the iteration was left"),
            fatal=(),
            raise_failures=failures == "raise",
            lifecycle=self.client.lifecycle,
        )

    # One request

    def begin(
        self,
        item: Any,
        until: float,
        position: Position | None = None,
        stamps: Stamps | None = None,
        exact: bool | None = None,
    ) -> Flight:
        """Choose, and run what is to run here. ``until``: as in `EdgeClient.until`; ``stamps``: of an earlier
        attempt.
        """
        flight = self._send(item, None, stamps or Stamps(), until, position, exact)
        self._flying.append(flight)
        return flight

    def _send(
        self,
        item: Any,
        call: Call | None,
        stamps: Stamps,
        until: float,
        position: Position | None,
        exact: bool | None,
    ) -> Flight:
        """Choose, and begin there. A cut that a witness disables at the same time is not chosen again."""
        tried: set[str] = set()
        while True:
            choice, name = self._choose(item)
            call = None if name == CLOUD_FILE else call or self._read(item)
            if stamps.prepared is None:
                stamps.prepared = now_ns()
            work: Call | Path = self._path(item) if call is None else call
            ahead = sum(_unsent(flight) for flight in self._flying)
            try:
                codec = choice.candidate.codec if name == choice.candidate.name else ""
                running = self.client.requests.begin(work, name, stamps, until, position, exact, codec)
            except CutRefused:
                if name in tried or not self._is_refused(name):
                    raise
                tried.add(name)
                continue
            return Flight(item, call, choice, stamps, until, running, exact, ahead)

    def _choose(self, item: Any) -> tuple[ChosenWay, str]:
        """Return the controller's choice, and the cut's name for this item."""
        self._report_refused()
        self._report_allowed()
        with self.lock:
            choice = self.controller.choose(now_ns())
        self.decisions.choice(choice)
        name = choice.candidate.name
        if name == EDGE_ONLY and not self._local:
            name = self._last_networked  # the server is gone, and is the only way
        if name == CLOUD_FILE and not self._is_file(item):
            name = "input"
        if self._local and not self._is_allowed(name):
            name = EDGE_ONLY
        if name != self._cut:
            old, self._cut = self._cut, name
            self.client.lifecycle.emit(Stage.ON_SPLIT_CHANGE, old=old, new=name, reason=choice.reason)
        if name != EDGE_ONLY:
            self._last_networked = name
        return choice, name

    def _report_refused(self) -> None:
        """Inform the controller of cuts that witnesses have disabled."""
        for cut, reason in self.client.refused.items():
            with self.lock:
                if cut in self._known_refused:
                    continue
                self._known_refused.add(cut)
                for name in WHOLE_THERE if cut == "input" else (cut,):
                    self.controller.refuse(name)
            self.decisions.event("refused", cut=cut, reason=reason)

    def _report_allowed(self) -> None:
        """Inform the controller of the cuts that this side may use, when they change."""
        cuts = self.client.cuts
        if cuts == self._allowed:
            return
        self._allowed = cuts
        names = cuts if cuts is None or "input" not in cuts else cuts | {CLOUD_ONLY}
        with self.lock:
            self.controller.allow(names)
        self.decisions.event("allowed", cuts=None if cuts is None else sorted(cuts))

    def _is_allowed(self, name: str) -> bool:
        cuts = self.client.cuts
        return cuts is None or name == EDGE_ONLY or ("input" if name == CLOUD_ONLY else name) in cuts

    def _is_refused(self, name: str) -> bool:
        return ("input" if name in (*WHOLE_THERE, "input") else name) in self.client.refused

    def finish(self, flight: Flight) -> Answer:
        """Wait for the answer, from here or there, and inform the controller."""
        try:
            answer = self._answer(flight)
        except BaseException:
            self._give_up(flight, "the caller was interrupted")
            raise
        finally:
            self._forget(flight)
            self._last_finished = now_ns()
        self._observe(flight, answer)
        return answer

    def _answer(self, flight: Flight) -> Answer:
        """Return the first answer."""
        running = flight.running
        if isinstance(running, Done):
            return running.answer
        exchange = running.exchange
        while not exchange.wait(POLL_SECONDS if flight.hedged is None else HEDGED_SECONDS):
            if exchange.remaining() <= 0 and flight.hedged is None:
                break  # past its deadline
            if flight.hedged is None:
                self._watch_over(flight, running)
            elif flight.hedged.done():
                return self._local_answer(flight, running)
        forbidden = self._local and isinstance(exchange.error, AccessRefused) and not self._is_allowed(str(running.cut))
        if exchange.settled and isinstance(exchange.error, FALL_BACK) and self._local and not forbidden:
            self._gone(f"{type(exchange.error).__name__}: {exchange.error}", exchange.error.retry_after_seconds or 0.0)
            if flight.hedged is None:
                self._start_hedge(flight, "the server failed")
            return self._local_answer(flight, running)
        if flight.hedged is not None:
            self._hedge.abandon(flight.hedged)
        try:
            return self.client.requests.finish(running)
        except CutRefused:
            if not self._is_refused(running.head.split):
                raise
        except AccessRefused:
            if not forbidden:
                raise
        return self._again(flight, running)

    def _again(self, flight: Flight, running: Running) -> Answer:
        """Repeat a request whose cut was disabled, or not allowed, meanwhile."""
        old, position = flight.stamps, Position(running.about.index, running.about.total)
        began = old.called if old.prepared is None else old.prepared
        stamps = Stamps(called=old.called, prepared=old.prepared, kept_ns=old.aside_ns)
        stamps.retry_ns = now_ns() - began - old.aside_ns
        new = self._send(flight.item, flight.call, stamps, flight.until, position, flight.exact)
        flight.call, flight.choice, flight.stamps = new.call, new.choice, new.stamps
        flight.running, flight.bytes_ahead, flight.hedged = new.running, new.bytes_ahead, None
        return self._answer(flight)

    def _watch_over(self, flight: Flight, running: Running) -> None:
        """Check whether it is late, or the server is gone."""
        exchange = running.exchange
        if exchange.interruptions or running.connection.state is State.BACKOFF:
            self._gone(running.connection.last_reason)
            if self._local:
                self._start_hedge(flight, "the server is gone")
            return
        elapsed = self._waited(exchange)
        candidate = flight.choice.candidate
        with self.lock:
            self.controller.observe_slow(now_ns(), candidate.key, exchange.bytes_up, elapsed)
        if self._local and running.connection.is_silent:
            self._start_hedge(flight, "the server does not say that it lives")
        elif self._local and is_late(candidate, elapsed):
            expected = expected_ns(candidate) / 1e6
            self._start_hedge(flight, f"late: {elapsed / 1e6:.0f} ms, where {expected:.0f} were expected")

    def _waited(self, exchange: Exchange) -> int:
        """Return nanoseconds for which this request alone was awaited, after those before it."""
        handed = exchange.stamps.packed
        return 0 if handed is None else now_ns() - max(handed, self._last_finished)

    def _start_hedge(self, flight: Flight, why: str) -> None:
        self.decisions.event("hedge", candidate=flight.choice.candidate.key, reason=why)
        old = flight.stamps
        assert isinstance(flight.running, Running)
        about = flight.running.about
        aside = old.kept_ns + self.client.requests.witnesses.between(old.packed, now_ns())

        def run() -> Answer:
            stamps = Stamps(called=old.called, prepared=old.prepared, kept_ns=aside)
            call = flight.call or self._read(flight.item)
            stamps.retry_ns = now_ns() - (old.called if old.prepared is None else old.prepared) - aside
            return self.client.requests.local(call, stamps, Position(about.index, about.total))

        flight.hedged = self._hedge.run(run)

    def _local_answer(self, flight: Flight, running: Running) -> Answer:
        assert flight.hedged is not None
        exchange, key = running.exchange, flight.choice.candidate.key
        try:
            answer = flight.hedged.result()
            if not exchange.settled and not exchange.interruptions:
                waited = self._waited(exchange)
                with self.lock:
                    self.controller.observe_slow(now_ns(), key, exchange.bytes_up, waited, given_up=True)
        finally:
            self.client.requests.cancel(running, "it was answered on this side first")
        return answer

    def leave(self, flight: Flight, why: str) -> None:
        """Cancel it. Any thread may, also while another waits for it."""
        self._give_up(flight, why)
        self._forget(flight)

    def _forget(self, flight: Flight) -> None:
        with suppress(ValueError):  # removed by whichever comes first
            self._flying.remove(flight)

    def _give_up(self, flight: Flight, why: str) -> None:
        """Cancel its parts; no effect on what is over."""
        if flight.hedged is not None:
            self._hedge.abandon(flight.hedged)
        self.client.requests.cancel(flight.running, why)

    # What it reports

    def _observe(self, flight: Flight, answer: Answer) -> None:
        now, times, key = now_ns(), answer.times, flight.choice.candidate.key
        with self.lock:
            if answer.split == EDGE_ONLY:
                self.controller.observe_edge(now, EDGE_ONLY, times.edge_compute)
                return
            self.controller.observe_edge(now, key, times.edge_compute)
            tail = times.server - times.server_queue
            self.controller.observe_server(now, key, tail, times.server_queue)
            chosen = flight.choice.candidate
            if chosen.codec and answer.split == ("input" if chosen.name == CLOUD_ONLY else chosen.name):
                self.controller.observe_bytes(key, answer.bytes_up)
            if answer.sends == 1 and not times.retry:
                network = times.send_wait + times.network
                self.controller.observe_transfer(now, answer.bytes_up, answer.bytes_down, network, flight.bytes_ahead)

    def _gone(self, why: str, seconds: float = 0.0) -> None:
        self.monitor.gone(why, seconds)

    # Inputs

    def _link(self) -> Link:
        with self.lock:
            return self.controller.link or UNKNOWN

    def _is_file(self, item: Any) -> bool:
        return self._prepare is not None and isinstance(getattr(item, "path", item), Path)

    def _path(self, item: Any) -> Path:
        path: Path = getattr(item, "path", item)
        return path

    def _read(self, item: Any) -> Call:
        if isinstance(item, Call) or self._prepare is None:
            return Call.of(item)
        return Call(*self._prepare(item))


def _unsent(flight: Flight) -> int:
    """Return the bytes of a request still to be sent, as far as this side knows."""
    running = flight.running
    if isinstance(running, Done) or running.settled or running.exchange.stamps.last_sent is not None:
        return 0
    return running.exchange.bytes_up
