"""A camera: a V4L2 device of this machine, or a stream from the network."""

from __future__ import annotations

import glob
import re
import stat
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar
from urllib.parse import urlsplit

from edge_client.sources.source import Source, check
from edge_client.sources.videos import LIVE_FORMATS, ToPixels, naming_errors, opened
from shared_hooks.errors import InputMismatch, SpecError
from shared_hooks.frames import Frame, FrameId, Pixels

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream


# Frames that come by themselves: read in a thread of its own, which never waits for whoever takes them.


# The queue of live frames: so many wait, and the oldest is dropped.

T = TypeVar("T")


class Closed(Exception):
    """Nothing comes any more, and nothing is left."""


class Late(Exception):
    """Nothing came in time."""


class Latest(Generic[T]):
    """At most ``most`` (1 or more) things that wait to be taken, in their order. One thread puts, any thread takes."""

    def __init__(self, most: int) -> None:
        self._waiting: deque[T] = deque(maxlen=most)
        self._changed = threading.Condition()
        self._ended = False
        self._error: Exception | None = None
        self.dropped = 0
        """How many gave way."""

    def put(self, thing: T) -> None:
        """Never waits. After `end` it has no effect."""
        with self._changed:
            if self._ended:
                return
            self.dropped += len(self._waiting) == self._waiting.maxlen
            self._waiting.append(thing)
            self._changed.notify_all()

    def end(self, error: Exception | None = None) -> None:
        """No more will come; ``error`` is raised in whoever has taken the last. Only the first call counts."""
        with self._changed:
            if not self._ended:
                self._ended, self._error = True, error
                self._changed.notify_all()

    def ready(self, seconds: float | None) -> bool:
        """Whether `take` would not wait, now or within so long (None: as long as it takes)."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._waiting) or self._ended, seconds)

    def take(self, seconds: float | None = None) -> T:
        """The oldest that waits. Raises Late, Closed, or the error it ended with."""
        with self._changed:
            self._wait(seconds)
            return self._waiting.popleft()

    def newest(self, seconds: float | None = None) -> T:
        """A look at the newest; it stays where it is. Raises as `take`."""
        with self._changed:
            self._wait(seconds)
            return self._waiting[-1]

    def _wait(self, seconds: float | None) -> None:
        if not self.ready(seconds):
            raise Late
        if not self._waiting:
            raise self._error or Closed


KEPT: Final = 2
"""Frames that wait, by default: one is the freshest, two outlast a hitch of one frame."""
LEAVE_SECONDS: Final = 1.0
"""For the thread to end at `close`. One that a device holds ends when that returns, or with the process."""


def live(frames: Iterable[Pixels], name: str = "camera", *, queue: int = KEPT, timeout: float | None = None) -> Live:
    """A source of your own camera's frames: arrays of uint8, (height, width, 3), RGB, a new one for each.

    ``frames`` is read in another thread, as fast as it gives them, until the source is closed (a generator is closed,
    too); it ends the source when it ends, and what it raises is raised where the frame would be taken (what is no
    Exception, such as SystemExit, as InputMismatch). ``queue`` frames wait, and the oldest is dropped. ``timeout``:
    seconds without a frame after which it is given up (None: never).
    """
    return Live(frames, name, queue=queue, timeout=timeout)


class Live(Source):
    """`live` says what the arguments are."""

    live = True

    def __init__(
        self,
        frames: Iterable[Pixels],
        name: str,
        *,
        queue: int = KEPT,
        timeout: float | None = None,
    ) -> None:
        """Begins to read at once. Raises SpecError for a queue of less than 1, and for text and paths."""
        super().__init__(name)
        if isinstance(frames, (str, bytes, PurePath)):
            raise SpecError(
                "live takes an iterable of frames (arrays of uint8, (height, width, 3), RGB), "
                f"not {type(frames).__name__}: folder, video and camera take names"
            )
        if queue < 1:
            raise SpecError(f"queue={queue}: at least one frame must be able to wait")
        self._frames = frames
        self._timeout = timeout
        self._latest: Latest[tuple[int, Pixels]] = Latest(queue)
        self._dropped_before: int | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._read, name=f"frames of {name}", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        return 0 if self._dropped_before is None else self._latest.dropped - self._dropped_before

    def first(self) -> Frame:
        """The newest, once one has come. Raises InputMismatch, and what the frames end by."""
        try:
            return self._one(self._latest.newest)
        except Closed:
            raise InputMismatch(f"{self.name}: ended without {'another' if self.taken else 'a'} frame") from None

    def wait_for_input(self, seconds: float) -> bool:
        return self._latest.ready(seconds)

    def close(self) -> None:
        self._closing.set()
        self._latest.end()
        if self._thread is not threading.current_thread():
            self._thread.join(LEAVE_SECONDS)

    def _items(self) -> Iterator[Frame]:
        if self._dropped_before is None:  # what went by before anybody asked was not dropped
            self._dropped_before = self._latest.dropped
        while True:
            try:
                frame = self._one(self._latest.take)
            except Closed:
                return
            yield frame

    def _one(self, get: Callable[[float | None], tuple[int, Pixels]]) -> Frame:
        try:
            index, pixels = get(self._timeout)
        except Late:
            raise InputMismatch(f"{self.name}: no frame for {self._timeout:g} s") from None
        return Frame(FrameId(self.name, index), pixels)

    def _read(self) -> None:
        frames: Iterator[Pixels] = iter(())
        try:
            frames = iter(self._frames)
            for index, pixels in enumerate(frames):
                if self._closing.is_set():
                    break
                self._latest.put((index, pixels))
            self._latest.end()
        except Exception as error:
            self._latest.end(error)
        except BaseException as error:  # it would end this thread alone, and the taker would wait for ever
            ended = InputMismatch(f"{self.name}: its frames ended by {error!r}")
            ended.__cause__ = error
            self._latest.end(ended)
        finally:
            if (close := getattr(frames, "close", None)) is not None:
                close()


SCHEMES: Final[Mapping[str, str]] = {
    "rtsp": "rtsp,rtp,tcp,udp",
    "rtsps": "rtsp,rtp,tcp,tls",
    "http": "http,https,tls,tcp",
    "https": "https,tls,tcp",
    "tcp": "tcp",
    "udp": "udp",
}
"""Schemes of addresses, and what FFmpeg may open for each."""
TIMEOUT: Final = 10.0
HOST: Final = re.compile(r"(\[[^]@]*]|[^:@?#]+)(:\d{1,5})?")
"""The host of an address, with its port; an IPv6 address is in brackets."""
DAMAGED_IN_A_ROW: Final = 300
"""Packets that cannot be decoded, as before the first whole picture, until a stream is given up."""


def camera(
    where: str | Path,
    *,
    size: tuple[int, int] | None = None,
    rate: float | None = None,
    pixel_format: str | None = None,
    queue: int = KEPT,
    timeout: float = TIMEOUT,
) -> Live:
    """The newest frames of a V4L2 device (``/dev/video0``) or of an address (``rtsp://``, ``http://``, ``tcp://`` ...).

    ``size`` (width, height), ``rate`` and ``pixel_format`` ("mjpeg", "yuyv422") are asked of a device, which may give
    something else. ``queue`` frames wait, and the oldest is dropped. ``timeout``: seconds without a frame after which
    it is given up. Returns when the first frame is there; raises InputMismatch.
    """
    text = str(where)
    if size is not None and (len(size) != 2 or min(size) < 1):
        raise SpecError(f"size={size}: expected (width, height) in pixels")
    if not timeout > 0:
        raise SpecError(f"timeout={timeout}: must be more than 0 seconds")
    if "://" in text:
        if size or rate or pixel_format:
            raise SpecError(f"{without_password(text)}: size, rate and pixel format can be asked of a device only")
        _check_address(text)
    else:
        _check_device(text)
    name = without_password(text)
    check(name)
    asked = {
        "video_size": f"{size[0]}x{size[1]}" if size else "",
        "framerate": f"{rate:g}" if rate else "",
        "input_format": pixel_format or "",
    }
    options = {key: value for key, value in asked.items() if value}
    source = Live(_frames(text, name, options, timeout), name, queue=queue, timeout=2 * timeout)
    try:
        source.first()
    except BaseException:
        source.close()
        raise
    return source


def is_camera(text: str) -> bool:
    """Whether a word names a camera, good or bad: an address, or a device, by whatever name."""
    return "://" in text or text.startswith(("/dev/video", "/dev/v4l/")) or Path(text).is_char_device()


def without_password(address: str) -> str:
    """An address as it may be shown: no password, and nothing after "?".

    A password may hold what ends a host. So, unless a host and nothing else stands before the first "/" (and no
    further address behind it), all from the first ":" to the last "@" is hidden; with a "?" in between, what follows
    the "@", too: it may be the query's.
    """
    scheme, there, rest = address.partition("://")
    if not there:
        return address
    login, at, where = rest.rpartition("@")
    user, colon, secret = login.partition(":")
    if at and colon and ("://" in rest or not HOST.fullmatch(rest.partition("/")[0])):
        rest = f"{user}:***@{'?' if '?' in secret else where}"
    shown, question, _ = rest.partition("?")
    return f"{scheme}://{shown}{'?...' if question else ''}"


def _frames(text: str, name: str, options: Mapping[str, str], timeout: float) -> Iterator[Pixels]:
    """In the reading thread. Ends by an error only: cameras have no end."""
    scheme, address, rest = text.partition("://")
    scheme = scheme.lower()
    if address:
        text = f"{scheme}://{rest}"  # FFmpeg knows them in lower case
        options = {"fflags": "nobuffer"}
    if scheme.startswith("rtsp"):
        options = {**options, "rtsp_transport": "tcp"}  # through any firewall, and nothing is lost on the way
    where = opened(
        text,
        name,
        protocols=SCHEMES.get(scheme, ""),
        formats=LIVE_FORMATS,
        format=None if address else "v4l2",
        options=options,
        timeout=timeout,
        quick=True,
    )
    # A device's packets are its own memory. None may outlive it, so they stay in there, and only copies come out.
    with where as (container, stream), closing(_pictures(container, stream, name, timeout)) as pictures:
        yield from pictures


def _pictures(
    container: InputContainer, stream: VideoStream, name: str, timeout: float
) -> Generator[Pixels, None, None]:
    from av.error import InvalidDataError

    damaged = count = 0
    to_pixels = ToPixels()
    packets: Any = container.demux(stream)  # a generator
    with closing(packets), naming_errors(name, timeout):
        for packet in packets:
            try:
                pictures = [to_pixels(frame) for frame in packet.decode()]
                damaged = 0
            except InvalidDataError:
                pictures = []
                damaged += 1
                if damaged == DAMAGED_IN_A_ROW:
                    raise InputMismatch(f"{name}: {damaged} packets in a row cannot be decoded") from None
            finally:
                del packet
            count += len(pictures)
            yield from pictures
    raise InputMismatch(f"{name}: the stream ended after {count} frames: its sender closed it or is gone")


def _check_address(text: str) -> None:
    name, scheme = without_password(text), text.partition("://")[0].lower()
    if scheme not in SCHEMES:
        raise InputMismatch(f"{name}: {scheme}:// is not taken; take {', '.join(f'{one}://' for one in SCHEMES)}")
    try:
        parts = urlsplit(text)
        good = bool(parts.hostname) and (scheme not in ("tcp", "udp") if parts.port is None else parts.port > 0)
    except ValueError:
        good = False
    if not good:
        raise InputMismatch(f"{name}: no host in it, or no port that there is")


def _check_device(text: str) -> None:
    path = Path(text)
    there = sorted(glob.glob("/dev/video*"))
    others = f"; there are {', '.join(there)}" if there else "; there is none on this machine"
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise InputMismatch(f"no such camera: {text} ({error.strerror}){others}") from None
    if not stat.S_ISCHR(mode):
        raise InputMismatch(f"{text} is no camera: not a device{others}")
