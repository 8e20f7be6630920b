"""A TCP relay that adds one-way latency in both directions; it can also be slow, a broken server or a broken path.

    python -m studies.experiments.relay HOST:PORT TO_HOST:TO_PORT ONE_WAY_MS

prints ``listening on HOST:PORT`` and then obeys lines on standard input, each answered by ``ok``: ``delay MS``,
``pass``, ``refuse`` (every connection is reset and new ones are refused), ``stall`` (nothing moves), ``reset`` (every
connection is reset, new ones are welcome). It ends with its standard input.

Threads and not asyncio, because an event loop's timers have the grain of a millisecond.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType

PIECE = 64 << 10
MOST_HELD = 64 << 20  # bytes under way in one direction: above what any rate here needs for any latency


class Relay:
    """Forwards connections to ``target``. Use as a context manager; `address` is where it listens."""

    def __init__(self, target: tuple[str, int], listen: tuple[str, int] = ("127.0.0.1", 0), delay: float = 0.0) -> None:
        self.delay = delay
        """Seconds, one way; may be changed at any time, also while bytes are under way (they keep theirs)."""
        self.moving = threading.Event()
        """Cleared: nothing is forwarded."""
        self.moving.set()
        self.rate = 0.0
        """Bytes a second, each way of each connection; 0 = as they come."""
        self.slices = 0
        """Bytes that are passed on at a time, at most; each is drawn. 0 = as they come."""
        self.vanishing = False
        """Connections that are made now carry nothing, and never will."""
        self._target = target
        self._draw = random.Random(0)
        self._lock = threading.Lock()
        self._links: set[Pair] = set()
        self._listener: socket.socket | None = None
        self.address = listen
        self.accept()

    def accept(self) -> None:
        """Listen, unless it does."""
        with self._lock:
            if self._listener is not None:
                return
            self._listener = socket.create_server(self.address)
            self.address = self._listener.getsockname()[:2]
            threading.Thread(target=self._serve, args=(self._listener,), daemon=True).start()

    def refuse(self) -> None:
        """Close the door and reset everybody inside."""
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            listener.close()
        self.reset()

    def reset(self) -> None:
        """Every connection ends with a reset on both sides."""
        for link in self._forget():
            link.reset()

    def end(self) -> None:
        """Every connection ends, in the middle of whatever is under way, as if both sides had wished so."""
        for link in self._forget():
            link.end()

    def vanish(self) -> None:
        """What is sent on the connections of now is lost from here on, and neither side hears of it."""
        for link in self._forget():
            link.dead = True

    def halve(self) -> None:
        """The server's side of every connection is reset, and the client's side does not hear of it."""
        for link in self._forget():
            link.halve()

    def _forget(self) -> set[Pair]:
        with self._lock:
            links, self._links = self._links, set()
        return links

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """``data`` as it is passed on now, each piece when it is time for the next."""
        left = memoryview(data)
        while left:
            slices, rate = self.slices, self.rate  # others change them meanwhile
            most = slices or (max(1, int(rate / 50)) if rate else len(left))
            size = self._draw.randint(1, most) if slices else most
            yield bytes(left[:size])
            if rate:
                time.sleep(min(size, len(left)) / rate)
            left = left[size:]

    close = refuse

    def __enter__(self) -> Relay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                near = listener.accept()[0]
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, 10.0)
            except OSError:
                _abort(near)
                continue
            far.settimeout(None)
            pair = Pair(self, near, far)
            pair.dead = self.vanishing
            with self._lock:
                welcome = self._listener is listener
                if welcome:
                    self._links.add(pair)
            if welcome:
                pair.start()
            else:
                pair.reset()

    def left(self, pair: Pair) -> None:
        """Both directions of ``pair`` have ended."""
        with self._lock:
            self._links.discard(pair)


class Pair:
    """A connection from a client and the one to the server that goes with it."""

    def __init__(self, relay: Relay, near: socket.socket, far: socket.socket) -> None:
        self._relay, self._near, self._far = relay, near, far
        self._open = 2
        self._broken = False
        self.dead = False
        """What comes is thrown away."""
        self._lock = threading.Lock()
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        for source, sink in ((self._near, self._far), (self._far, self._near)):
            line = Line()
            threading.Thread(target=self._read, args=(source, line), daemon=True).start()
            threading.Thread(target=self._write, args=(line, sink), daemon=True).start()

    def reset(self) -> None:
        self._broken = True
        for end in (self._near, self._far):
            _abort(end)

    def end(self) -> None:
        self._broken = True
        for end in (self._near, self._far):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def halve(self) -> None:
        self.dead = True
        _abort(self._far)

    def _read(self, source: socket.socket, line: Line) -> None:
        while True:
            try:
                data = source.recv(PIECE)
            except OSError:
                if not self.dead:  # else the other side is not to know
                    self.reset()
                data = b""
            line.put(time.monotonic() + self._relay.delay, data)
            if not data:
                return

    def _write(self, line: Line, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = line.get()
                if (early := due - time.monotonic()) > 0:
                    time.sleep(early)
                self._relay.moving.wait()
                if self._broken:
                    break
                if self.dead:
                    if data:
                        continue
                    break  # the other side does not hear of the end either
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    break
                for piece in self._relay.pieces(data):
                    sink.sendall(piece)
        with self._lock:
            self._open -= 1
            if self._open:
                return
        self._relay.left(self)
        self._near.close()
        self._far.close()


class Line:
    """Bytes under way in one direction, each piece with the time at which it is due; an empty piece is the end."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._held = 0
        self._changed = threading.Condition()

    def put(self, due: float, data: bytes) -> None:
        """Waits while `MOST_HELD` bytes are under way."""
        with self._changed:
            self._changed.wait_for(lambda: self._held < MOST_HELD)
            self._pieces.append((due, data))
            self._held += len(data)
            self._changed.notify_all()

    def get(self) -> tuple[float, bytes]:
        """The oldest piece."""
        with self._changed:
            self._changed.wait_for(lambda: self._pieces)
            due, data = self._pieces.popleft()
            self._held -= len(data)
            self._changed.notify_all()
            return due, data


def _abort(end: socket.socket) -> None:
    """End a connection with a reset, at once, though threads wait on it: that is what connecting to nowhere does."""
    if (number := end.fileno()) >= 0:
        ctypes.CDLL(None).connect(number, struct.pack("=H14x", socket.AF_UNSPEC), 16)
    end.close()


def main(words: Sequence[str]) -> int:
    """See the module."""
    listen, target, milliseconds = words
    with Relay(_address(target), _address(listen), float(milliseconds) / 1000) as relay:
        print(f"listening on {relay.address[0]}:{relay.address[1]}", flush=True)
        for order in sys.stdin:
            _obey(relay, order.split())
            print("ok", flush=True)
    return 0


def _obey(relay: Relay, order: Sequence[str]) -> None:
    match order:
        case ["delay", milliseconds]:
            relay.delay = float(milliseconds) / 1000
        case ["pass"]:
            relay.moving.set()
            relay.accept()
        case ["refuse"]:
            relay.refuse()
        case ["reset"]:
            relay.reset()
        case ["stall"]:
            relay.moving.clear()
        case _:
            raise SystemExit(f"relay: what is {' '.join(order)!r}?")


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
