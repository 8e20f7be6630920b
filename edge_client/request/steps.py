"""`Steps`: requests of a decoding session, whose bytes somebody else packs (`edge_client.generation`)."""

from __future__ import annotations

from collections.abc import Callable

from edge_client.answer import Answer
from edge_client.request.departures import Departures
from edge_client.request.edge_model import EdgeModel
from edge_client.request.reports import Reports
from edge_client.request.running import settle
from edge_client.transport import Outgoing, Stamps, Times, now_ns, wire
from shared_hooks.lifecycle import About, Stage


class Steps:
    """Of one client. ``at_once``: requests between head and answer, at most. Any thread may call."""

    def __init__(self, edge_model: EdgeModel, reports: Reports, departures: Departures, at_once: int) -> None:
        self._edge_model = edge_model
        self._reports = reports
        self._lifecycle = reports.lifecycle
        self._departures = departures
        self._at_once = at_once

    def ask(self, pack: Callable[[], Outgoing], split: str, stamps: Stamps, until: float) -> Answer:
        """One step, which ``pack`` makes bytes of: `Answer.output` is what was said (a dictionary) and the tensors."""
        about = self._reports.about()

        def answer() -> Answer:
            self._lifecycle.emit(Stage.BEFORE_REQUEST, inputs=None, split=split, began_ns=stamps.called)
            return self._answer(pack, split, stamps, until, about)

        return self._reports.ending(about, answer)

    def _answer(self, pack: Callable[[], Outgoing], split: str, stamps: Stamps, until: float, about: About) -> Answer:
        connection = self._departures.connect()
        place = self._departures.place(split, self._at_once, until)
        try:
            stamps.admitted = stamps.computed = now_ns()
            self._lifecycle.emit(Stage.BEFORE_ENCODE, value=None)
            outgoing = pack()
            self._lifecycle.emit(Stage.AFTER_ENCODE, nbytes=outgoing.nbytes)
            stamps.packed = now_ns()
            exchange = self._departures.exchange(about.id, outgoing, stamps, until, about, place)
        except BaseException:
            place.leave()
            raise
        connection.submit(exchange)
        settle(exchange, connection)
        stamps.taken = now_ns()
        if exchange.error is not None:
            raise exchange.error
        assert exchange.reply is not None
        self._lifecycle.emit(Stage.BEFORE_DECODE, nbytes=len(exchange.payload))
        output = wire.step_answer(exchange)
        self._lifecycle.emit(Stage.AFTER_DECODE, value=output)
        stamps.unpacked = finished = now_ns()
        reply = exchange.reply
        return Answer(
            output=output,
            request_id=exchange.id,
            split=split,
            layer_id=-1,
            times=Times.from_stamps(stamps, wire.server_times(reply.durations)),
            layers_edge=[],
            layers_cloud=[],
            bytes_up=exchange.bytes_up,
            bytes_down=exchange.bytes_down,
            sends=exchange.sends,
            measured_ns=finished - stamps.called,
            finished_ns=finished,
            load=wire.load(reply),
            observations=self._edge_model.observed(exchange.observers, {}, reply.observations),
            transforms=tuple(reply.transforms),
            company=max(1, reply.company),
        )
