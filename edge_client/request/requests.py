"""One client's requests: the head runs, the frontier goes, the answer comes back; or the whole model runs here."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from edge_client.answer import Answer
from edge_client.call import Call
from edge_client.modes import CLOUD_FILE, CLOUD_ONLY, EDGE_ONLY
from edge_client.request.ahead import Ahead
from edge_client.request.edge_model import Cut, EdgeModel, Head
from edge_client.request.many import Position
from edge_client.request.places import Place, Places
from edge_client.transport import (
    Connection,
    Exchange,
    Opening,
    Outgoing,
    ServerTimes,
    Stamps,
    State,
    Times,
    layer_metrics,
    now_ns,
    wire,
)
from edge_client.witness import INPUT, Kept, Witness, Witnesses
from shared_hooks import Crossing
from shared_hooks.codecs import CODECS
from shared_hooks.errors import (
    AccessRefused,
    Cancelled,
    CutRefused,
    DeadlineExceeded,
    Disagreement,
    IsthmusError,
    PlanMismatch,
    QuotaExceeded,
    ReferenceLost,
    RemoteError,
    ServerUnavailable,
    SpecError,
    UnknownModel,
    WorkerLost,
)
from shared_hooks.lifecycle import About, Stage

NOT_SERVED: Final = (
    *(ServerUnavailable, Disagreement, UnknownModel, AccessRefused, QuotaExceeded),
    *(RemoteError, WorkerLost),
)
"""The server's fault, or its wish: the whole model on this side has an answer, where it may be asked for one."""
SENDING_SECONDS: Final = 0.001
"""For the connection's threads, which need the interpreter to send a request; then its records are made."""


@dataclass(slots=True)
class Running:
    """A request on its way, with what is needed to finish it or to start it over."""

    connection: Connection
    exchange: Exchange
    work: Call | Path
    cut: Cut
    head: Head
    about: About
    kept: Kept | None = None  # for a witness
    over: bool = False  # hooks have heard how it ended, or will
    again: Running | None = None  # what was begun in its place
    exact: bool = True
    codec: str = ""  # chosen with the cut
    bytes_ahead: int = 0  # of requests that were to be sent before it, where codecs are chosen

    @property
    def settled(self) -> bool:
        return self.exchange.settled


@dataclass(frozen=True, slots=True)
class Done:
    """What was answered on this side."""

    answer: Answer
    settled: bool = True


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
        self._exact = exact
        self._postprocess = postprocess
        self._edge_model = edge_model
        self._fallback = fallback
        self.witnesses = Witnesses(edge_model.wrapped, witness, edge_model.find)
        self._connect = connect
        self._at_once, self._of_a_run = at_once, of_a_run
        self._metrics = metrics
        self._max_answer_bytes = max_answer_bytes
        self.lifecycle = edge_model.lifecycle
        self._ids = itertools.count(1)
        self._sending: list[Exchange] = []
        self._client_id = client_id
        self._singles = itertools.count()
        self._places = Places(max_in_flight_bytes)
        self._in_vain: set[str] = set()  # cuts at which nothing leaves before its head has ended

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
        about = self._about(position)
        try:
            with self.lifecycle.request(about):
                self.lifecycle.emit(Stage.BEFORE_REQUEST, inputs=work, split=cut, began_ns=stamps.called)
                if self._fallback and (connection := self._connect()).gone:
                    connection.nudge()
                    answer = self._instead(work, stamps, about, f"no server: {connection.last_reason}")
                    self.lifecycle.emit(Stage.ON_RESULT, answer=answer)
                    self._over(about, answer=answer)
                    return Done(answer)
                most = self._at_once if position is None else self._of_a_run
                return self._begin(work, cut, stamps, until, about, most, exact, codec=codec)
        except BaseException as error:
            self._over(about, error)
            raise

    def _begin(
        self,
        work: Call | Path,
        cut: Cut,
        stamps: Stamps,
        until: float,
        about: About,
        most: int,
        exact: bool,
        before: Running | None = None,
        codec: str = "",
    ) -> Running:
        """``most``: requests under way, this one included. ``before``: the attempt that this one repeats."""
        connection = self._connect()
        place = self._take_place((cut, codec), most, until)
        ahead: Ahead | None = None
        try:
            kept = self._keep(work, stamps, before)
            stamps.admitted = now_ns()
            # what is compared with the whole model here is to be that, bit for bit
            together = not (exact or kept is not None)
            if isinstance(work, Path):
                head = self._edge_model.file(work, stamps)
            else:
                offered = wire.FIRST_CODECS if connection.welcome is None else wire.codecs_of(connection.welcome)
                if before is None:
                    begin = partial(self._announced, connection, about, together, until)
                    ahead = Ahead(partial(self._edge_model.way, codec=codec), begin, self._in_vain)
                head = self._edge_model.head(work, "input" if cut == CLOUD_ONLY else cut, stamps, offered, codec, ahead)
            opening = None if ahead is None else ahead.opening
            # the server has answered the old one, or has heard of one that came to nothing
            anew = before is not None or (ahead is not None and ahead.has_left and opening is None)
            id = next(self._ids) if anew else about.id
            exchange = self._exchange(id, head.outgoing, stamps, until, about, place, together)
        except BaseException:
            place.leave()
            if ahead is not None:
                ahead.give_up()
            raise
        before_it = self._bytes_ahead()
        self._sending.append(exchange)
        connection.submit(exchange, opening)
        return Running(
            connection, exchange, work, cut, head, about, kept, exact=exact, codec=codec, bytes_ahead=before_it
        )

    def _announced(
        self, connection: Connection, about: About, together: bool, until: float, crossing: Crossing, most: int
    ) -> Opening | None:
        """A request whose head is running, of ``most`` bytes; None where it does not leave before it is whole."""
        header = wire.open_header(
            about,
            crossing.digest,
            most,
            until - time.monotonic(),
            want_metrics=self._wants_metrics,
            together=together,
            hooks=self._edge_model.observers,
        )
        opening = Opening(header, wire.cut_frame(crossing.digest, crossing.to_bytes()))
        return opening if connection.begin(opening) else None

    @property
    def _wants_metrics(self) -> bool:
        return self._metrics and self._edge_model.wrapped.metrics_enabled

    def _bytes_ahead(self) -> int:
        """Of requests that have still to be sent, and take the link first."""
        self._sending = [one for one in self._sending if one.stamps.last_sent is None and not one.settled]
        return sum(one.bytes_up for one in self._sending)

    def _exchange(
        self,
        id: int,
        outgoing: Outgoing,
        stamps: Stamps,
        until: float,
        about: About,
        place: Place,
        together: bool = False,
    ) -> Exchange:
        """Which gives its place back when it is settled."""
        place.weigh(outgoing.nbytes)
        return Exchange(
            id,
            outgoing,
            until=until,
            stamps=stamps,
            check_header=lambda header, size: wire.check_answer(header, size, self._max_answer_bytes),
            want_metrics=self._wants_metrics,
            together=together,
            observers=self._edge_model.observers,
            about=about,
            lifecycle=self.lifecycle,
            on_settled=place.leave,
        )

    def _take_place(self, cut: Hashable, most: int, until: float) -> Place:
        if (place := self._places.take(cut, most, until)) is None:
            raise DeadlineExceeded(
                f"{self._places} are in flight and none was answered before the deadline (max_in_flight, "
                "max_in_flight_bytes)"
            )
        return place

    def ask(self, pack: Callable[[], Outgoing], split: str, stamps: Stamps, until: float) -> Answer:
        """A step of a decoding session, which ``pack`` makes bytes of: `Answer.output` is what was said (a dictionary)
        and the tensors.
        """
        about = self._about(None)
        try:
            with self.lifecycle.request(about):
                self.lifecycle.emit(Stage.BEFORE_REQUEST, inputs=None, split=split, began_ns=stamps.called)
                answer = self._asked(pack, split, stamps, until, about)
                self.lifecycle.emit(Stage.ON_RESULT, answer=answer)
        except BaseException as error:
            self._over(about, error)
            raise
        self._over(about, answer=answer)
        return answer

    def _asked(self, pack: Callable[[], Outgoing], split: str, stamps: Stamps, until: float, about: About) -> Answer:
        connection = self._connect()
        place = self._take_place(split, self._at_once, until)
        try:
            stamps.admitted = stamps.computed = now_ns()
            self.lifecycle.emit(Stage.BEFORE_ENCODE, value=None)
            outgoing = pack()
            self.lifecycle.emit(Stage.AFTER_ENCODE, nbytes=outgoing.nbytes)
            stamps.packed = now_ns()
            exchange = self._exchange(about.id, outgoing, stamps, until, about, place)
        except BaseException:
            place.leave()
            raise
        connection.submit(exchange)
        self._wait(exchange, connection)
        stamps.taken = now_ns()
        if exchange.error is not None:
            raise exchange.error
        assert exchange.reply is not None
        self.lifecycle.emit(Stage.BEFORE_DECODE, nbytes=len(exchange.payload))
        output = wire.step_answer(exchange)
        self.lifecycle.emit(Stage.AFTER_DECODE, value=output)
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

    def _wait(self, exchange: Exchange, connection: Connection) -> None:
        """Until it is settled."""
        try:
            if not exchange.wait():
                connection.cancel(exchange, _too_late(exchange, connection))
        except BaseException:
            connection.cancel(exchange, Cancelled("the caller was interrupted"))
            raise

    def _keep(self, work: Call | Path, stamps: Stamps, before: Running | None) -> Kept | None:
        """What a witness will need, taken before the head; the time goes to ``stamps.kept_ns``."""
        if isinstance(work, Path):
            self.witnesses.check_cut(INPUT)  # the same whole model there
            return None
        if before is None and not self.witnesses.share:
            return None
        began = now_ns()
        if before is None:
            kept = self.witnesses.keep(work)
        elif (kept := before.kept) is not None:
            kept.mark()
        stamps.kept_ns += now_ns() - began
        return kept

    def finish(self, running: Running | Done) -> Answer:
        """Wait for the answer. A path that the plan did not hold is added to it, and the input sent once more; so is a
        frame that refers to one that is gone.
        """
        if isinstance(running, Done):
            return running.answer
        running.over = True
        try:
            with self.lifecycle.request(running.about):
                try:
                    answer = self._finish(running)
                except NOT_SERVED as error:
                    if not self._fallback:
                        raise
                    why = f"{type(error).__name__}: {error}"
                    answer = self._instead(running.work, _anew(running.exchange.stamps), running.about, why)
                self.lifecycle.emit(Stage.ON_RESULT, answer=answer)
        except BaseException as error:
            self._over(running.about, error)
            raise
        self._over(running.about, answer=answer)
        return answer

    def _finish(self, running: Running) -> Answer:
        try:
            return self._collect(running)
        except (PlanMismatch, ReferenceLost) as error:
            if running.exchange.error is not error or isinstance(running.work, Path):
                raise
            lost = isinstance(error, ReferenceLost)
        if not lost:
            self._edge_model.plan(running.work)
        elif running.head.frame is not None:
            self._edge_model.frames.lost(running.head.frame)
        stamps = _anew(running.exchange.stamps)
        until = running.exchange.until
        work, cut, about = running.work, running.cut, running.about
        running.again = self._begin(
            work, cut, stamps, until, about, self._of_a_run, running.exact, running, running.codec
        )
        return self._collect(running.again)

    def cancel(self, running: Running | Done, why: str) -> None:
        """Nobody wants it any more; another thread that waits for it gets Cancelled. No effect on what is answered."""
        if not isinstance(running, Running):
            return
        for one in (running, running.again):
            if one is not None:
                one.connection.cancel(one.exchange, Cancelled(why))
        if not running.over:
            running.over = True
            self._over(running.about, running.exchange.error or Cancelled(why))

    def _instead(self, work: Call | Path, stamps: Stamps, about: About, why: str) -> Answer:
        """The whole model here, though the request was to be split: ``why``."""
        call = work if isinstance(work, Call) else self._edge_model.read(work)
        return replace(self._local(call, stamps, about), fallback=why)

    def local(self, call: Call, stamps: Stamps, position: Position | None = None) -> Answer:
        """The whole model, here."""
        about = self._about(position)
        try:
            with self.lifecycle.request(about):
                self.lifecycle.emit(Stage.BEFORE_REQUEST, inputs=call, split=EDGE_ONLY, began_ns=stamps.called)
                answer = self._local(call, stamps, about)
                self.lifecycle.emit(Stage.ON_RESULT, answer=answer)
        except BaseException as error:
            self._over(about, error)
            raise
        self._over(about, answer=answer)
        return answer

    def _local(self, call: Call, stamps: Stamps, about: About) -> Answer:
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

    def _about(self, position: Position | None) -> About:
        position = position or Position(next(self._singles), None)
        return About(next(self._ids), position.index, position.total, self._edge_model.model_id, self._client_id)

    def _over(self, about: About, error: BaseException | None = None, answer: Answer | None = None) -> None:
        """Hooks hear how it ended. Ctrl-C and what abandons a hedge are no errors."""
        if error is not None and not isinstance(error, Exception):
            error = Cancelled("the caller was interrupted")
        if error is not None and not isinstance(error, Cancelled):
            self.lifecycle.emit(Stage.ON_ERROR, about, where="request", error=error)
        self.lifecycle.emit(Stage.AFTER_REQUEST, about, error=error, answer=answer)

    def _collect(self, running: Running) -> Answer:
        exchange, connection = running.exchange, running.connection
        try:
            exchange.wait(min(SENDING_SECONDS, exchange.remaining()))
            layers, forward = running.head.records()
            if not exchange.wait():
                connection.cancel(exchange, _too_late(exchange, connection))
        except BaseException:
            connection.cancel(exchange, Cancelled("the caller was interrupted"))
            raise
        stamps = exchange.stamps
        stamps.taken = now_ns()
        stamps.witness_ns = self.witnesses.between(stamps.received, stamps.taken)
        if exchange.error is not None:
            raise exchange.error
        assert exchange.reply is not None
        if running.head.frame is not None:
            self._edge_model.frames.answered(running.head.frame)
        output = self._edge_model.output(exchange)
        stamps.unpacked = finished = now_ns()
        self.witnesses.check_cut(INPUT if isinstance(running.work, Path) else running.head.split, running.head.layer_id)
        witness, output = self._witness(running, output)
        times = Times.from_stamps(stamps, wire.server_times(exchange.reply.durations))
        if self._edge_model.chooser is not None and exchange.sends == 1 and not times.retry:
            self._edge_model.chooser.answered(
                exchange.bytes_up + running.bytes_ahead,
                exchange.bytes_down,
                times.send_wait + times.network,
                (running.head.decoding_ns, times.server_decode),
            )
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
        witness, output = self.witnesses.judge(running.kept, output, running.head.split, number, said, kept_ns)
        if not witness.same:
            self.lifecycle.emit(Stage.ON_ERROR, about, where="witness", error=CutRefused(witness.finding))
        return witness, output


def _anew(old: Stamps) -> Stamps:
    """For a request that starts over: what was done until now was in vain, but for what was put aside."""
    stamps = Stamps(called=old.called, prepared=old.prepared, kept_ns=old.aside_ns)
    stamps.retry_ns = now_ns() - (old.called if old.prepared is None else old.prepared) - old.aside_ns
    return stamps


def _too_late(exchange: Exchange, connection: Connection) -> IsthmusError:
    what = f"no answer from {connection.address} to request {exchange.id} before its deadline"
    if connection.state is not State.READY:
        return ServerUnavailable(f"{what}: no connection (last: {connection.last_reason})")
    if exchange.put_off_by is not None:
        return DeadlineExceeded(f"{what}: put off {exchange.put_offs} times (last: {exchange.put_off_by})")
    return DeadlineExceeded(what)


def work_of(item: object, cut: Cut) -> Path | None:
    """The file to send as it is; None where the cut is another one."""
    if cut != CLOUD_FILE:
        return None
    path = getattr(item, "path", item)
    if not isinstance(path, Path):
        raise SpecError(f'split="{CLOUD_FILE}" takes input files (a path or an InputItem), not {type(item).__name__}')
    return path
