"""One client's requests: the head runs, what crosses is sent, the answer comes back; or the whole model runs here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from edge_client.answer import Answer
from edge_client.call import Call
from edge_client.request.edge_model import Cut, EdgeModel
from edge_client.request.sending import NOT_SERVED, Done, Position, Reports, Route, Running, Sender, restarted, settle
from edge_client.transport import Connection, Exchange, Outgoing, ServerTimes, Stamps, Times, now_ns, wire
from edge_client.transport.times import tail_metrics
from edge_client.user_text import EDGE_ONLY
from edge_client.witness import Witness, Witnesses
from shared_hooks import LayerMetrics
from shared_hooks.codecs import by_wire
from shared_hooks.errors import Cancelled, CodecFailed, CutRefused, IsthmusError, PlanMismatch, ReferenceLost
from shared_hooks.lifecycle import About, Stage
from shared_hooks.metrics import LayerTable
from shared_hooks.modules import INPUT

# `Steps`: requests of a decoding session, packed by `edge_client.generation`.

LEAVES_SECONDS: Final = 0.0003
"""How long a step's thread leaves the interpreter to the one that sends, before it does other work."""


class Steps:
    """One client's generation steps. ``max_concurrent``: how many may be in progress after their heads. Thread-safe."""

    def __init__(self, edge_model: EdgeModel, reports: Reports, sender: Sender, max_concurrent: int) -> None:
        self._edge_model = edge_model
        self._reports = reports
        self._lifecycle = reports.lifecycle
        self._sender = sender
        self._max_concurrent = max_concurrent

    def begin(self, pack: Callable[[], Outgoing], split: str, stamps: Stamps, until: float) -> SentStep:
        """Send one step, which ``pack`` encodes; its `Answer.output` is the reply (a dictionary) and the tensors."""
        about = self._reports.about()
        try:
            with self._reports.lifecycle.request(about):
                connection, exchange = self._submitted(pack, split, stamps, until, about)
        except BaseException as error:
            self._reports.over(about, error)
            raise

        def answer() -> Answer:
            return self._settled(connection, exchange, split, stamps)

        return SentStep(connection, exchange, partial(self._reports.ending, about, answer))

    def _submitted(
        self, pack: Callable[[], Outgoing], split: str, stamps: Stamps, until: float, about: About
    ) -> tuple[Connection, Exchange]:
        self._lifecycle.emit(Stage.BEFORE_REQUEST, inputs=None, split=split, began_ns=stamps.called)
        connection = self._sender.connect()
        reservation = self._sender.reserve(split, self._max_concurrent, until)
        try:
            stamps.admitted = stamps.computed = now_ns()
            self._lifecycle.emit(Stage.BEFORE_ENCODE, value=None)
            outgoing = pack()
            self._lifecycle.emit(Stage.AFTER_ENCODE, nbytes=outgoing.nbytes)
            stamps.packed = now_ns()
            exchange = self._sender.exchange(about.id, outgoing, stamps, until, about, reservation)
        except BaseException:
            reservation.release()
            raise
        connection.submit(exchange)
        return connection, exchange

    def _settled(self, connection: Connection, exchange: Exchange, split: str, stamps: Stamps) -> Answer:
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
            batch_size=max(1, reply.batch_size),
        )


@dataclass(frozen=True)
class SentStep:
    """A step that was sent. ``answer``: waits for its answer; called once, by `result` or `cancel`."""

    _connection: Connection
    _exchange: Exchange
    answer: Callable[[], Any]

    def result(self, meanwhile: Callable[[], None] | None = None) -> Any:
        """Wait for the answer. ``meanwhile``: called first; its error cancels the step."""
        if meanwhile is not None:
            try:
                self._exchange.wait(LEAVES_SECONDS)
                meanwhile()
            except BaseException:
                self.cancel(Cancelled("the step was given up"))
                raise
        return self.answer()

    @property
    def bytes_up(self) -> int:
        """The bytes of its header and payload."""
        return self._exchange.bytes_up

    @property
    def is_over(self) -> bool:
        """Whether `result` returns at once."""
        return self._exchange.settled

    def cancel(self, why: IsthmusError) -> None:
        """Cancel it."""
        self._connection.cancel(self._exchange, why)
        with suppress(IsthmusError):
            self.answer()


# `Local`: the whole model, on this side.


class Local:
    """Answers without a server. ``postprocess``: output -> result."""

    def __init__(self, edge_model: EdgeModel, reports: Reports, postprocess: Callable[[Any], Any] | None) -> None:
        self._edge_model = edge_model
        self._reports = reports
        self._postprocess = postprocess

    def answer(self, call: Call, stamps: Stamps, position: Position | None = None) -> Answer:
        """Answer a request of its own."""
        about = self._reports.about(position)

        def answer() -> Answer:
            self._reports.lifecycle.emit(Stage.BEFORE_REQUEST, inputs=call, split=EDGE_ONLY, began_ns=stamps.called)
            return self._answer(call, stamps, about)

        return self._reports.ending(about, answer)

    def instead(self, work: Call | Path, stamps: Stamps, about: About, why: str) -> Answer:
        """Answer a request that was to be split; ``why``: the reason."""
        call = work if isinstance(work, Call) else self._edge_model.read(work)
        return replace(self._answer(call, stamps, about), fallback=why)

    def _answer(self, call: Call, stamps: Stamps, about: About) -> Answer:
        whole = self._edge_model.whole(call, stamps)
        finished = stamps.unpacked or now_ns()
        return Answer(
            output=whole.output,
            postprocess=self._postprocess,
            request_id=about.id,
            split=EDGE_ONLY,
            layer_id=None,
            times=Times.from_stamps(stamps, ServerTimes()),
            layers_edge=whole.layers,
            layers_cloud=[],
            bytes_up=0,
            bytes_down=0,
            sends=0,
            measured_ns=finished - stamps.called - stamps.aside_ns,
            finished_ns=finished,
            forward_edge=whole.forward,
            observations=self._edge_model.observed(tuple(whole.observations), whole.observations),
            transforms=whole.transforms,
        )


# `Receiver`: turns a reply into an answer.

SENDING_SECONDS: Final = 0.001
"""How long the connection's threads, which need the interpreter, have to send a request before its records are made."""


class Receiver:
    """Receives the answers of one client. ``postprocess``: output -> result. Any thread may call."""

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
        tables: dict[int, LayerTable] = {}
        metrics_of = partial(tail_metrics, known=exchange.known_tables, found=tables)
        layers_cloud: Sequence[LayerMetrics]
        layers_cloud, forward_cloud = metrics_of(exchange.reply)
        parts = [wire.part_of(part, metrics_of) for part in exchange.reply.parts]
        if parts:
            layers_cloud = [*layers_cloud, *(layer for part in parts for layer in part.layers)]
        self._edge_model.layer_tables.learn(exchange.cut_digest, tables)
        return Answer(
            output=output,
            postprocess=self._postprocess,
            request_id=exchange.id,
            split=running.head.split,
            layer_id=running.head.layer_id,
            times=times,
            layers_edge=layers,
            layers_cloud=layers_cloud,
            bytes_up=exchange.bytes_up,
            bytes_down=exchange.bytes_down,
            sends=exchange.sends,
            measured_ns=finished - stamps.called - stamps.aside_ns,
            finished_ns=finished if witness is None else now_ns(),
            load=wire.load(exchange.reply),
            forward_edge=forward,
            forward_cloud=forward_cloud,
            observations=self._edge_model.observed(
                exchange.observers, running.head.observations, exchange.reply.observations, exchange.reply.parts
            ),
            transforms=(
                *running.head.transforms,
                *exchange.reply.transforms,
                *(name for part in exchange.reply.parts for name in part.transforms),
            ),
            parts=parts,
            compiled=exchange.reply.compiled,
            batch_size=max(1, exchange.reply.batch_size),
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
        """Return the witness, if there is to be one, and the answer's output after it."""
        # what this side changes itself is not the model's own
        if running.kept is None or running.head.transforms:
            return None, output
        if not all(codec is not None and codec.lossless for codec in map(by_wire, running.head.outgoing.codecs)):
            return None, output
        about = running.exchange.about
        welcome = running.connection.welcome
        reported = {} if welcome is None else dict(welcome.about)
        number, kept_ns = running.exchange.id, running.exchange.stamps.kept_ns
        witness, output = self._witnesses.judge(running.kept, output, running.head.split, number, reported, kept_ns)
        if not witness.same:
            self._lifecycle.emit(Stage.ON_ERROR, about, where="witness", error=CutRefused(witness.finding))
        return witness, output


class Requests:
    """Begins requests and finishes them; ``connect`` gives the connection. Any thread may call."""

    def __init__(
        self,
        edge_model: EdgeModel,
        connect: Callable[[], Connection],
        *,
        max_concurrent: int,
        max_pipelined: int,
        max_in_flight_bytes: int,
        metrics: bool,
        max_answer_bytes: int,
        client_id: str = "",
        witness: float = 0.0,
        fallback: bool = False,
        exact: bool = True,
        postprocess: Callable[[Any], Any] | None = None,
    ) -> None:
        """``max_concurrent``: single requests between head and answer, at most; ``max_pipelined``: with those of a run.
        ``fallback``: what the server does not answer is answered here. ``exact``: of requests that do not say
        whether a batch's last bits will do. ``postprocess``: output -> result.
        """
        self._edge_model = edge_model
        self._max_concurrent, self._max_pipelined = max_concurrent, max_pipelined
        self._fallback = fallback
        self._exact = exact
        self._reports = reports = Reports(edge_model, client_id)
        self.lifecycle = reports.lifecycle
        self.witnesses = Witnesses(edge_model.wrapped, witness, edge_model.find)
        self._local = Local(edge_model, reports, postprocess)
        self._sender = Sender(
            edge_model,
            connect,
            reports,
            self.witnesses,
            max_in_flight_bytes=max_in_flight_bytes,
            metrics=metrics,
            max_answer_bytes=max_answer_bytes,
        )
        self._receiver = Receiver(edge_model, reports, self.witnesses, postprocess)
        self.reservations = self._sender.reservations
        self.local = self._local.answer
        steps = Steps(edge_model, reports, self._sender, max_concurrent)
        self.begin_step = steps.begin

    def begin(
        self,
        work: Call | Path,
        cut: Cut,
        stamps: Stamps,
        until: float,
        position: Position | None = None,
        exact: bool | None = None,
        codec: str = "",
        route: Route = (),
    ) -> Running | Done:
        """Wait for a place, run the head and submit; or, without a cut, run everything. A path is sent as it is.

        ``position``: of the input in its run; None for a single one. ``codec``: chosen with the cut, if codecs are
        chosen. ``route``: of a chain.
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
                    most = self._max_concurrent if position is None else self._max_pipelined
                    return self._sender.attempt(work, cut, stamps, until, about, most, exact, codec, route=route)
        except BaseException as error:
            self._reports.over(about, error)
            raise
        return Done(self._reports.ending(about, partial(self._local.instead, work, stamps, about, lost)))

    def finish(self, running: Running | Done) -> Answer:
        """Wait for the answer. A path that the plan did not contain is added and the input sent once more; so is a
        frame that refers to a lost one.
        """
        if isinstance(running, Done):
            return running.answer
        running.over = True
        return self._reports.ending(running.about, partial(self._answer, running))

    def cancel(self, running: Running | Done, why: str) -> None:
        """Cancel it: a thread that waits for it gets Cancelled. No effect if it is answered."""
        if not isinstance(running, Running):
            return
        for one in (running, running.again):
            if one is not None:
                one.connection.cancel(one.exchange, Cancelled(why))
        if not running.over:
            running.over = True
            self._reports.over(running.about, running.exchange.error or Cancelled(why))

    def _lost(self) -> str | None:
        """Return why no server can be asked, if this side may answer itself; else None."""
        connection = self._sender.connect() if self._fallback else None
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
            stamps = restarted(running.exchange.stamps)
            return self._local.instead(running.work, stamps, running.about, f"{type(error).__name__}: {error}")

    def _finish(self, running: Running) -> Answer:
        try:
            return self._receiver.collect(running)
        except (PlanMismatch, ReferenceLost, CodecFailed) as found:
            if running.exchange.error is not found or isinstance(running.work, Path):
                raise
            error = found
        if isinstance(error, PlanMismatch):
            self._edge_model.plan(running.work)
        elif isinstance(error, CodecFailed):
            self._edge_model.codec_failed(running.head.outgoing.codecs, str(error))
        elif running.head.frame is not None:
            self._edge_model.frames.lost(running.head.frame)
        running.again = self._sender.attempt(
            running.work,
            running.cut,
            restarted(running.exchange.stamps),
            running.exchange.until,
            running.about,
            self._max_pipelined,
            running.exact,
            running.codec,
            before=running,
            route=running.route,
        )
        return self._receiver.collect(running.again)
