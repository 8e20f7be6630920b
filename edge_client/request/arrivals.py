"""`Arrivals`: what came back becomes an answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from edge_client.answer import Answer
from edge_client.request.edge_model import EdgeModel
from edge_client.request.reports import Reports
from edge_client.request.running import Running, settle
from edge_client.transport import Times, layer_metrics, now_ns, wire
from edge_client.witness import INPUT, Witness, Witnesses
from shared_hooks.codecs import CODECS
from shared_hooks.errors import Cancelled, CutRefused
from shared_hooks.lifecycle import Stage

SENDING_SECONDS: Final = 0.001
"""For the connection's threads, which need the interpreter to send a request; then its records are made."""


class Arrivals:
    """Of one client. ``postprocess``: output -> result. Any thread may call."""

    def __init__(
        self, edge_model: EdgeModel, reports: Reports, witnesses: Witnesses, postprocess: Callable[[Any], Any] | None
    ) -> None:
        self._edge_model = edge_model
        self._lifecycle = reports.lifecycle
        self._witnesses = witnesses
        self._postprocess = postprocess

    def collect(self, running: Running) -> Answer:
        """Wait for the answer, and judge it where a witness is to. Raises what the request ended with."""
        exchange, connection = running.exchange, running.connection
        try:
            exchange.wait(min(SENDING_SECONDS, exchange.remaining()))
            layers, forward = running.head.records()
        except BaseException:
            connection.cancel(exchange, Cancelled("the caller was interrupted"))
            raise
        settle(exchange, connection)
        stamps = exchange.stamps
        stamps.taken = now_ns()
        stamps.witness_ns = self._witnesses.between(stamps.received, stamps.taken)
        if exchange.error is not None:
            raise exchange.error
        assert exchange.reply is not None
        if running.head.frame is not None:
            self._edge_model.frames.answered(running.head.frame)
        output = self._edge_model.output(exchange)
        stamps.unpacked = finished = now_ns()
        of_file = isinstance(running.work, Path)
        self._witnesses.check_cut(INPUT if of_file else running.head.split, running.head.layer_id)
        witness, output = self._witness(running, output)
        times = Times.from_stamps(stamps, wire.server_times(exchange.reply.durations))
        self._learn(running, times)
        return Answer(
            output=output,
            postprocess=self._postprocess,
            request_id=exchange.id,
            split=running.head.split,
            layer_id=running.head.layer_id,
            times=times,
            layers_edge=layers,
            layers_cloud=layer_metrics.layer_metrics(exchange.reply),
            bytes_up=exchange.bytes_up,
            bytes_down=exchange.bytes_down,
            sends=exchange.sends,
            measured_ns=finished - stamps.called - stamps.aside_ns,
            finished_ns=finished if witness is None else now_ns(),
            load=wire.load(exchange.reply),
            forward_edge=forward,
            forward_cloud=layer_metrics.forward_metrics(exchange.reply),
            observations=self._edge_model.observed(
                exchange.observers, running.head.observations, exchange.reply.observations
            ),
            transforms=(*running.head.transforms, *exchange.reply.transforms),
            compiled=exchange.reply.compiled,
            company=max(1, exchange.reply.company),
            witness=witness,
            codecs=running.head.outgoing.codecs,
        )

    def _learn(self, running: Running, times: Times) -> None:
        """Where codecs are chosen: how long these bytes took."""
        exchange, chooser = running.exchange, self._edge_model.chooser
        if chooser is not None and exchange.sends == 1 and not times.retry:
            chooser.answered(
                exchange.bytes_up + running.bytes_ahead,
                exchange.bytes_down,
                times.send_wait + times.network,
                (running.head.decoding_ns, times.server_decode),
            )

    def _witness(self, running: Running, output: Any) -> tuple[Witness | None, Any]:
        """The witness, if there is to be one, and the answer's output after it."""
        lossless = all(CODECS[name].lossless for name in running.head.outgoing.codecs)
        # what this side changes itself is not the model's own
        if running.kept is None or running.head.transforms or not lossless:
            return None, output
        about = running.exchange.about
        welcome = running.connection.welcome
        said = {} if welcome is None else dict(welcome.about)
        number, kept_ns = running.exchange.id, running.exchange.stamps.kept_ns
        witness, output = self._witnesses.judge(running.kept, output, running.head.split, number, said, kept_ns)
        if not witness.same:
            self._lifecycle.emit(Stage.ON_ERROR, about, where="witness", error=CutRefused(witness.finding))
        return witness, output
