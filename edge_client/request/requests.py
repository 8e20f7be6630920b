"""One client's requests: the head runs, the frontier goes, the answer comes back; or the whole model runs here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from edge_client.answer import Answer
from edge_client.call import Call
from edge_client.modes import EDGE_ONLY
from edge_client.request.arrivals import Arrivals
from edge_client.request.departures import Departures
from edge_client.request.edge_model import Cut, EdgeModel
from edge_client.request.here import Here
from edge_client.request.many import Position
from edge_client.request.reports import Reports
from edge_client.request.running import NOT_SERVED, Done, Running, anew
from edge_client.request.steps import Steps
from edge_client.transport import Connection, Stamps
from edge_client.witness import Witnesses
from shared_hooks.errors import Cancelled, PlanMismatch, ReferenceLost
from shared_hooks.lifecycle import Stage


class Requests:
    """Begins requests and finishes them; ``connect`` gives the connection. Any thread may call."""

    def __init__(
        self,
        edge_model: EdgeModel,
        connect: Callable[[], Connection],
        *,
        at_once: int,
        of_a_run: int,
        max_in_flight_bytes: int,
        metrics: bool,
        max_answer_bytes: int,
        client_id: str = "",
        witness: float = 0.0,
        fallback: bool = False,
        exact: bool = True,
        postprocess: Callable[[Any], Any] | None = None,
    ) -> None:
        """``at_once``: requests between head and answer, at most; ``of_a_run``: those of a run of many included.
        ``fallback``: what the server does not answer is answered here. ``exact``: of requests that do not say
        whether a batch's last bits will do. ``postprocess``: output -> result.
        """
        self._edge_model = edge_model
        self._at_once, self._of_a_run = at_once, of_a_run
        self._fallback = fallback
        self._exact = exact
        self._reports = reports = Reports(edge_model, client_id)
        self.lifecycle = reports.lifecycle
        self.witnesses = Witnesses(edge_model.wrapped, witness, edge_model.find)
        self._here = Here(edge_model, reports, postprocess)
        self._departures = Departures(
            edge_model,
            connect,
            reports,
            self.witnesses,
            max_in_flight_bytes=max_in_flight_bytes,
            metrics=metrics,
            max_answer_bytes=max_answer_bytes,
        )
        self._arrivals = Arrivals(edge_model, reports, self.witnesses, postprocess)
        self.places = self._departures.places
        self.local = self._here.answer
        self.ask = Steps(edge_model, reports, self._departures, at_once).ask

    def begin(
        self,
        work: Call | Path,
        cut: Cut,
        stamps: Stamps,
        until: float,
        position: Position | None = None,
        exact: bool | None = None,
        codec: str = "",
    ) -> Running | Done:
        """Wait for a place, run the head, submit; or, without a cut, run everything. A path is sent as it is.

        ``position``: where in its run the input is; None for one by itself. ``codec``: chosen with the cut, where
        codecs are chosen.
        """
        exact = self._exact if exact is None else exact
        if cut == EDGE_ONLY:
            assert isinstance(work, Call)
            return Done(self.local(work, stamps, position))
        about = self._reports.about(position)
        try:
            with self.lifecycle.request(about):
                self.lifecycle.emit(Stage.BEFORE_REQUEST, inputs=work, split=cut, began_ns=stamps.called)
                if (lost := self._lost()) is None:
                    most = self._at_once if position is None else self._of_a_run
                    return self._departures.attempt(work, cut, stamps, until, about, most, exact, codec)
        except BaseException as error:
            self._reports.over(about, error)
            raise
        return Done(self._reports.ending(about, partial(self._here.instead, work, stamps, about, lost)))

    def finish(self, running: Running | Done) -> Answer:
        """Wait for the answer. A path that the plan did not hold is added to it, and the input sent once more; so is a
        frame that refers to one that is gone.
        """
        if isinstance(running, Done):
            return running.answer
        running.over = True
        return self._reports.ending(running.about, partial(self._answer, running))

    def cancel(self, running: Running | Done, why: str) -> None:
        """Nobody wants it any more; another thread that waits for it gets Cancelled. No effect on what is answered."""
        if not isinstance(running, Running):
            return
        for one in (running, running.again):
            if one is not None:
                one.connection.cancel(one.exchange, Cancelled(why))
        if not running.over:
            running.over = True
            self._reports.over(running.about, running.exchange.error or Cancelled(why))

    def _lost(self) -> str | None:
        """Why there is nobody to ask, where this side may answer itself."""
        connection = self._departures.connect() if self._fallback else None
        if connection is None or not connection.gone:
            return None
        connection.nudge()
        return f"no server: {connection.last_reason}"

    def _answer(self, running: Running) -> Answer:
        try:
            return self._finish(running)
        except NOT_SERVED as error:
            if not self._fallback:
                raise
            stamps = anew(running.exchange.stamps)
            return self._here.instead(running.work, stamps, running.about, f"{type(error).__name__}: {error}")

    def _finish(self, running: Running) -> Answer:
        try:
            return self._arrivals.collect(running)
        except (PlanMismatch, ReferenceLost) as error:
            if running.exchange.error is not error or isinstance(running.work, Path):
                raise
            lost = isinstance(error, ReferenceLost)
        if not lost:
            self._edge_model.plan(running.work)
        elif running.head.frame is not None:
            self._edge_model.frames.lost(running.head.frame)
        running.again = self._departures.attempt(
            running.work,
            running.cut,
            anew(running.exchange.stamps),
            running.exchange.until,
            running.about,
            self._of_a_run,
            running.exact,
            running.codec,
            before=running,
        )
        return self._arrivals.collect(running.again)
