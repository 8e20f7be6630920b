"""What one client asks for on one stream: requests announced, received in chunks, handed to the core, cancelled."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence

from cloud_server import wire
from cloud_server.access import granted
from cloud_server.decoding import Step
from cloud_server.models import FILE, Engine, check_open
from cloud_server.requests import Outlet, Request, State, about
from cloud_server.scheduling import Payer
from cloud_server.streams.area import Area
from cloud_server.streams.hub import Hub
from protos.chunks import ChunkFrame
from protos.headed import HeadedRequest
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import (
    AccessRefused,
    BadFrame,
    Cancelled,
    Disagreement,
    IsthmusError,
    ObserverRefused,
    ServerUnavailable,
    TooLarge,
)
from shared_hooks.lifecycle import Stage

_SKIPPED = 1024  # ids whose chunks may still be on their way; far above any client's requests in flight
MAX_OBSERVERS = 64
"""Most observers of one request; there are fewer kinds."""


class Uploads:
    """The requests that are coming in on ``outlet``, all for ``engine``. One thread calls."""

    def __init__(self, hub: Hub, outlet: Outlet, engine: Engine, area: Area | None = None) -> None:
        """``area``: where payloads may lie."""
        self._area = area
        self._hub = hub
        self._outlet = outlet
        self._engine = engine
        self._payer = Payer(outlet.caller.account, outlet.client_id, outlet.caller.policy.weight)
        self._receiving: dict[int, Request] = {}
        self._skipped: OrderedDict[int, None] = OrderedDict()

    def announce(self, headed: HeadedRequest) -> None:
        """A request's header: it is taken in, recognised as one that is known, or refused. With it the first bytes of
        its payload, or all.
        """
        frame = headed.header
        self._skipped.pop(frame.id, None)
        try:
            self._hub.requests.check_place(frame.id, self._outlet)
            area = self._area_of(headed)
            request = self._checked(frame, headed.nbytes)
            is_new = self._hub.requests.admit(request)
        except IsthmusError as error:
            if isinstance(error, ServerUnavailable):
                self._hub.turned_away(self._payer)
            unfinished = self._receiving.pop(frame.id, None)
            if unfinished is None or unfinished.state is State.OVER:
                self._tell(frame, error)
            else:
                self._hub.requests.abandon(unfinished, error)
            missing = (
                isinstance(error, Disagreement)
                and not frame.HasField("file")
                and frame.cut_digest not in self._hub.crossings
            )
            self._fail(frame.id, error, retry=True if missing else None)
            return
        if not is_new:
            self._skip(frame.id)
            return
        try:
            self._prepare(request)
            if area is not None:
                request.read(area, frame.area_offset)
        except IsthmusError as error:
            self._hub.requests.abandon(request, error)
            self._fail(frame.id, error)
            return
        if request.state is State.OVER:  # cancelled meanwhile, or it had to give way: what was allocated goes back
            request.release()
            self._skip(frame.id)
        elif (request.received_bytes == request.payload_bytes and not request.opening) or (
            headed.pieces and request.write(ChunkFrame(frame.id, 0, headed.pieces))
        ):
            self._submit(request)
        else:
            self._forget_ended()
            self._receiving[frame.id] = request

    def _area_of(self, headed: HeadedRequest) -> Area | None:
        """Where the payload lies; None where it comes on the stream."""
        if not headed.header.HasField("area_offset"):
            return None
        if self._area is None or headed.pieces:
            raise BadFrame("a payload is said to lie in an area, and there is none, or it came with the header, too")
        return self._area

    def _forget_ended(self) -> None:
        """Uploads that were given up or expired, and of which no chunk came since."""
        if len(self._receiving) >= self._hub.limits.max_in_flight:
            for id in [id for id, request in self._receiving.items() if request.state is not State.RECEIVING]:
                del self._receiving[id]
                self._skip(id)

    def _prepare(self, request: Request) -> None:
        """Raises HookRefused, and ServerUnavailable without the memory that the payload takes."""
        self._hub.requests.begin(request)
        self._hub.lifecycle.emit(Stage.BEFORE_RECEIVE, request.about, nbytes=request.payload_bytes)
        request.allocate()

    def _submit(self, request: Request) -> None:
        self._hub.lifecycle.emit(Stage.AFTER_RECEIVE, request.about, nbytes=request.payload_bytes)
        self._hub.submit(request)

    def _checked(self, frame: split_pb2.RequestHeader, come: int) -> Request:
        """The request of a header, checked as far as it can be before its payload comes; nothing is allocated yet.
        ``come``: bytes of the payload that came with it.
        """
        step = Step.of(frame)
        if frame.open and (step is not None or frame.HasField("file") or frame.HasField("area_offset")):
            raise BadFrame("only a request that is cut, and whose payload comes in chunks, may be open")
        if come > frame.payload_bytes:
            raise BadFrame(f"{frame.payload_bytes} bytes are announced, and {come} came with the header")
        self._check_observers(frame.hooks)
        limit = self._outlet.caller.max_request_bytes(self._hub.limits)
        if frame.payload_bytes > limit:
            most = f"at most {limit} are accepted (max_request_bytes)"
            raise TooLarge(f"a payload of {frame.payload_bytes} bytes is announced; {most}")
        if step is not None:
            self._check_cut(step.cut)
            self._engine.admit_step(frame.header, frame.payload_bytes, limit)
            turn = self._hub.decoding.turn(self._engine, self._outlet.party, step)
            return Request(self._outlet, self._engine, None, frame, turn)
        if frame.HasField("file"):
            file = frame.file
            self._check_cut(FILE)
            self._engine.admit_file(file.suffix, file.preprocess_digest, frame.header, frame.payload_bytes, limit)
            return Request(self._outlet, self._engine, None, frame)
        crossing = self._hub.crossings.get(frame.cut_digest, self._outlet.party)
        if crossing is None:
            raise Disagreement(f"no cut {frame.cut_digest[:80]!r} is held here; upload it, then ask again")
        self._check_cut("input" if crossing.layer_id < 0 else crossing.layer_name)
        if crossing.payload_bytes > limit:
            most = f"at most {limit} are accepted (max_request_bytes)"
            raise TooLarge(f"a frontier of {crossing.payload_bytes} bytes is announced; {most}")
        if frame.open:
            check_open(crossing, frame.header, frame.payload_bytes)
        else:
            self._engine.admit(crossing, frame.header, frame.payload_bytes, limit)
        return Request(self._outlet, self._engine, crossing, frame)

    def _check_observers(self, names: Sequence[str]) -> None:
        if len(names) > MAX_OBSERVERS:
            raise TooLarge(f"{len(names)} observers are asked for; at most {MAX_OBSERVERS} are taken")
        allowed = granted(self._outlet.caller.policy.observers, self._hub.observers)
        for name in names:
            if name not in allowed:
                text = ", ".join(allowed) or "none"
                where = f'to "{self._outlet.caller.identity}"' if name in self._hub.observers else "on this server"
                raise ObserverRefused(f"the observer {json.dumps(name[:80])} is not allowed {where}; allowed: {text}")

    def _check_cut(self, name: str) -> None:
        """A client that lies about its cut's name is found out by the rehearsal."""
        allowed = self._outlet.caller.policy.cuts
        if allowed is not None and name not in allowed:
            raise AccessRefused(
                f'identity "{self._outlet.caller.identity}" may not use the cut "{name[:256]}"; it may use: '
                f"{', '.join(allowed) or 'none'}"
            )

    def chunk(self, chunk: ChunkFrame) -> None:
        """A piece of a payload. Raises BadFrame for one that nobody announced."""
        request = self._receiving.get(chunk.id)
        if request is None:
            if chunk.id not in self._skipped:
                raise BadFrame(f"a chunk of payload {chunk.id}, which was not announced or is complete")
            return
        if request.state is not State.RECEIVING:  # cancelled, expired, or taken over by a newer stream
            del self._receiving[chunk.id]
            self._skip(chunk.id)
            return
        try:
            complete = request.write(chunk)
        except BadFrame as error:
            del self._receiving[chunk.id]
            self._hub.requests.abandon(request, error)
            self._fail(chunk.id, error)
            return
        if complete:
            del self._receiving[chunk.id]
            self._submit(request)

    def close(self, closing: split_pb2.Closing) -> None:
        """All of an open request has come. Raises BadFrame for one that nobody announced."""
        request = self._receiving.pop(closing.id, None)
        if request is None:
            if closing.id not in self._skipped:
                raise BadFrame(f"request {closing.id} is closed, which was not announced or is complete")
            return
        self._skip(closing.id)
        if request.state is not State.RECEIVING:  # cancelled, expired, or taken over by a newer stream
            return
        assert request.crossing is not None
        try:
            request.close(closing.header, closing.payload_bytes)
            limit = self._outlet.caller.max_request_bytes(self._hub.limits)
            self._engine.admit(request.crossing, closing.header, closing.payload_bytes, limit)
        except IsthmusError as error:
            self._hub.requests.abandon(request, error)
            self._fail(closing.id, error)
            return
        self._submit(request)

    def cancel(self, id: int) -> None:
        """The client no longer wants this request."""
        if self._receiving.pop(id, None) is not None:
            self._skip(id)
        self._hub.requests.cancel((self._outlet.caller.account, self._outlet.client_id, id))

    def _fail(self, id: int, error: IsthmusError, retry: bool | None = None) -> None:
        """Reports a request that goes no further; chunks of it that still come are no mistake."""
        self._skip(id)
        self._outlet.send(split_pb2.ServerFrame(failed=wire.failed(id, error, retry)))

    def _tell(self, frame: split_pb2.RequestHeader, error: IsthmusError) -> None:
        """Hooks hear of a request that was not taken in."""
        self._hub.lifecycle.emit(
            Stage.ON_ERROR, about(frame, -1, self._engine, self._outlet), where="request", error=error
        )

    def _skip(self, id: int) -> None:
        self._skipped[id] = None
        self._skipped.move_to_end(id)
        if len(self._skipped) > _SKIPPED:
            self._skipped.popitem(last=False)

    def end(self) -> None:
        """The client sends nothing more: what is not complete is forgotten."""
        for request in self._receiving.values():
            self._hub.requests.abandon(
                request, Cancelled("the client ended its stream before the payload was complete")
            )
