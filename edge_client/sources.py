"""Where inputs come from: files of a folder, frames of a video, frames of a camera. docs/sources.md

    with sources.camera("/dev/video0") as frames, EdgeClient("cloud:50051", "digits", split="relu") as client:
        for answer in client.infer_many(frames, prepare=client.spec.preprocess):
            ...

opening      which source the words of a command line name
cameras     a V4L2 device, or a stream from the network
videos      a video file; frames out of PyAV; its errors by name
source      what all of them are: `Source`; image and tensor files; frames a second; PyAV, where it is installed

A source that waits (files, videos) drops nothing. A live one keeps the newest frames. Loads PyAV when a video or a
camera is opened. No module has the name of a function here, which would stand before it.
"""

from __future__ import annotations

import errno
import glob
import re
import stat
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path, PurePath
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar, cast
from urllib.parse import urlsplit

import numpy as np

from edge_client.user_text import either, option
from shared_hooks.errors import InputMismatch, SpecError, near
from shared_hooks.frames import Frame, FrameId, Pixels

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

    from shared_hooks.models.inputs import InputItem


Item: TypeAlias = "InputItem | Frame"
"""What a source gives: `ModelSpec.preprocess` takes it."""


class Source(ABC):
    """Inputs one after the other, for `EdgeClient.infer_many`; `close` it, or use ``with``."""

    name: str
    """For messages; contains no password."""
    live: bool = False
    """Whether it continues by itself, so that a slow consumer misses frames."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.taken = 0
        """The number of inputs given so far."""
        self.broken: list[InputMismatch] = []
        """Why it ended early; of several sources, each that did."""

    @property
    def dropped(self) -> int:
        """Frames replaced by newer ones since the first was taken."""
        return 0

    def __iter__(self) -> Iterator[Item]:
        """Raise InputMismatch at the place where it breaks off; of several sources, after the last one."""
        self.broken = []
        try:
            for item in self._items():
                self.taken += 1
                yield item
        except InputMismatch as error:
            self.broken = self.broken or [error]
            raise

    @abstractmethod
    def first(self) -> Item:
        """Return the next input, without taking it. Raises InputMismatch."""

    @abstractmethod
    def _items(self) -> Iterator[Item]: ...

    def wait_for_input(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the next input or the end; returns whether it is there. Files always are."""
        return True

    def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Release the device, file and thread. Idempotent."""

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


# How many frames were read, dropped and answered, and how many per second.


WINDOW_SECONDS: Final = 2.0
"""The window of the rate shown while it runs."""


class SourceTally:
    """Counts one run through ``source``, from now, or from `start`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._began = time.monotonic()
        self._recent: deque[float] = deque()
        self.answered = 0
        self._seconds: float | None = None
        self._dropped: int | None = None

    def start(self) -> None:
        """Count the time from now, excluding preparation."""
        self._began = time.monotonic()

    def add(self) -> None:
        """Count an answer."""
        now = time.monotonic()
        self.answered += 1
        self._recent.append(now)
        while now - self._recent[0] > WINDOW_SECONDS:
            self._recent.popleft()

    def stop(self) -> None:
        """End the run."""
        self._seconds, self._dropped = self.seconds, self.dropped

    @property
    def seconds(self) -> float:
        """Seconds from its beginning to its end, or until now."""
        return time.monotonic() - self._began if self._seconds is None else self._seconds

    @property
    def dropped(self) -> int:
        """Dropped frames until its end."""
        return self._source.dropped if self._dropped is None else self._dropped

    @property
    def per_second(self) -> float:
        """Answers per second over the whole time; 0 before any."""
        return self.answered / self.seconds if self.answered else 0.0

    @property
    def now_per_second(self) -> float:
        """Recent answers per second."""
        span = min(self.seconds, WINDOW_SECONDS)
        return len(self._recent) / span if span else 0.0

    def line(self) -> str:
        """Return the text while it runs."""
        return f"{self._counts()}, {self.now_per_second:.1f} frames/s"

    def summary(self) -> str:
        """Return the text at the end."""
        return f"{self._source.name}: {self._counts()}, {self.per_second:.1f} frames/s"

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        return {
            "name": self._source.name,
            "live": self._source.live,
            "taken": self._source.taken,
            "dropped": self.dropped,
            "answered": self.answered,
            "seconds": self.seconds,
            "frames_per_second": self.per_second,
        }

    def _counts(self) -> str:
        return f"{self._source.taken} taken, {self.dropped} dropped, {self.answered} answered"


# Input files as a source.


def folder(*paths: str | Path) -> Files:
    """Return the images and tensors of a folder, by name; or of a file, a glob, or several of these.

    A file that is given twice comes twice. One that cannot be read fails at its place. Raises InputMismatch if there is
    none.
    """
    from shared_hooks.models.inputs import find_inputs  # imports torch, which a camera does not need

    return Files(find_inputs(paths, once=False), ", ".join(map(str, paths)))


class Files(Source):
    """A number of files; `len` returns it."""

    def __init__(self, items: Sequence[InputItem], name: str) -> None:
        super().__init__(name)
        self.items = list(items)

    def __len__(self) -> int:
        return len(self.items)

    def first(self) -> InputItem:
        return self.items[0]

    def _items(self) -> Iterator[InputItem]:
        return iter(self.items)


# PyAV, needed only for videos and cameras.


def check(what: str) -> None:
    """Raise SpecError without PyAV, which reading ``what`` needs."""
    if find_spec("av") is None:
        raise SpecError(f'{what}: videos and cameras need PyAV: pip install "isthmus[video]"')


# Frames from PyAV, and its errors by name.


FILE_FORMATS: Final = (
    "mov,mp4,matroska,webm,avi,mpegts,mpeg,mpegvideo,h264,hevc,av1,ivf,mjpeg,mpjpeg,flv,asf,ogg,mxf,m4v,h263"
)
"""Formats that FFmpeg may read. Others read lists of further files, or generate pictures."""
LIVE_FORMATS: Final = f"{FILE_FORMATS},rtsp,sdp,rtp,hls,v4l2,video4linux2"
MAX_PIXELS: Final = 1 << 26
"""Most pixels of a frame (8192 x 8192): a file of a few bytes may announce any size."""


@contextmanager
def opened(
    where: str,
    name: str,
    *,
    protocols: str,
    formats: str = FILE_FORMATS,
    format: str | None = None,
    options: Mapping[str, str] | None = None,
    timeout: float | None = None,
    quick: bool = False,
) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a file, device or address, and its first video stream. ``name``: for messages.

    ``protocols``, ``formats``: all that FFmpeg may open for it, whatever the file contains. ``timeout``: seconds, for
    opening and for each packet. ``quick``: frames come at once; otherwise the decoder works on several at a time on
    several processors. Raises InputMismatch.
    """
    import av

    bounds = {"protocol_whitelist": protocols, "format_whitelist": formats}
    with naming_errors(name, timeout, opening=True):
        container = av.open(where, "r", format=format, options={**bounds, **(options or {})}, timeout=timeout)
    with container:
        if not container.streams.video:
            raise InputMismatch(f"{name} holds no video")
        stream = container.streams.video[0]
        context = stream.codec_context
        if context.width * context.height > MAX_PIXELS:
            size = f"{context.width} x {context.height}"
            raise InputMismatch(f"{name} has pictures of {size} pixels; at most {MAX_PIXELS} are taken")
        context.options = {"max_pixels": str(MAX_PIXELS)}  # for pictures that grow on the way
        if quick:
            context.thread_type = "SLICE"
            context.options = {**context.options, "flags": "+low_delay"}
        else:
            context.thread_type = "AUTO"
        yield container, stream


@contextmanager
def naming_errors(name: str, timeout: float | None = None, *, opening: bool = False) -> Iterator[None]:
    """Convert PyAV's errors to InputMismatch about ``name``. FFmpeg's own text may contain a password, so only its
    reason is used.
    """
    from av.error import ExitError, FFmpegError, InvalidDataError

    began = time.monotonic()
    try:
        yield
    except FFmpegError as error:
        error.__traceback__ = None  # it holds packets, which may be memory of a device that is closed before them
        reason = f"{error.strerror}" + _HINTS.get(error.errno or 0, "")
        ended = isinstance(error, ExitError)
        if ended or isinstance(error, InvalidDataError) or error.errno == errno.EINVAL:
            # Some of FFmpeg's readers report bad data when the timeout ends them.
            if timeout is not None and (ended or (opening and time.monotonic() - began >= timeout)):
                reason = f"nothing came within {timeout:g} s"
            elif ended:
                pass  # ended by something else: FFmpeg's own message
            elif name.startswith("/dev/"):
                reason += "; it may not have this size, rate or pixel format"
            else:
                reason = "it cannot be read as a video: truncated, damaged or something else"
        raise InputMismatch(f"{name}: {reason}") from None
    except OSError as error:
        raise InputMismatch(f"{name}: {error.strerror or error}") from None


_HINTS: Final = {
    errno.EACCES: "; on most systems the group video may read cameras",
    errno.EBUSY: "; another program holds it",
    errno.EIO: "; there may be no such host, or no way to it",
}


class ToPixels:
    """Converts a decoded frame to RGB in its own memory, rotated as its display matrix says (phones). Not
    thread-safe.
    """

    def __init__(self) -> None:
        from av.video.reformatter import VideoReformatter

        self._reformatter = VideoReformatter()

    def __call__(self, frame: VideoFrame) -> Pixels:
        rgb = self._reformatter.reformat(frame, format="rgb24")
        pixels = cast(Pixels, rgb.to_ndarray())
        if rgb is frame:  # not converted, so the array may be memory of the device
            pixels = pixels.copy()
        turns = round(frame.rotation / 90) % 4
        return np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels


SUFFIXES: Final = frozenset(
    f".{kind}"
    for kind in "mp4 m4v mov mkv webm avi ts mts m2ts mpg mpeg flv wmv ogv 3gp mxf ivf h264 hevc mjpeg mjpg".split()
)
"""The suffixes of video files."""
MISSING_SECONDS: Final = 0.75
MISSING_STEPS: Final = 1.5
"""How much of the announced duration may be missing before a file counts as truncated: so many seconds (sound, and
edits of a few frames, may last longer than the pictures), or so many of the longest steps between pictures (some
containers do not say how long the last one is shown).
"""


def video(path: str | Path) -> Video:
    """Return the frames of a video file, in display order.

    Raises InputMismatch for a file without a readable frame; later, at its place, for one that ends early.
    """
    return Video(Path(path))


class Video(Source):
    """Decodes in the thread that takes the frames; each iteration starts again."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path
        if not path.exists():
            siblings = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
            raise InputMismatch(f"no such input: {path}.{near(path.name, siblings)}")
        if not path.is_file():
            raise InputMismatch(f"{path} is no file")
        check(str(path))
        from shared_hooks.models.inputs import truth_of  # imports torch, which a camera does not need

        self._truth = truth_of(path)
        self.first()

    def first(self) -> Frame:
        """Decoded again each time: otherwise each of many videos would keep one for the whole run."""
        with closing(self._items()) as frames:
            return next(frames)

    def _items(self) -> Generator[Frame, None, None]:
        where = f"file:{self.path}"  # so that a colon in a name is not read as a protocol
        with opened(where, self.name, protocols="file") as (container, stream):
            frames, pixels = container.decode(stream), ToPixels()
            index, end, step = 0, 0.0, 0.0
            before: float | None = None
            while True:
                with naming_errors(f"{self.name} after {index} frames" if index else self.name):
                    frame = next(frames, None)
                    if frame is None:
                        break
                    picture = pixels(frame)
                shown, lasts = frame.time or 0.0, float((frame.duration or 0) * (frame.time_base or 0))
                end = max(end, shown + lasts)
                step = max(step, lasts, 0.0 if before is None else shown - before)
                before = shown
                yield Frame(FrameId(self.name, index, frame.time, self._truth), picture)
                index += 1
            if not index:
                raise InputMismatch(f"{self.name} holds no frame that can be read: truncated?")
            announced = _announced_end(container, stream)
            # no step is known where there is one picture, which may be shown for any time
            if announced is not None and step and end < announced - max(MISSING_SECONDS, MISSING_STEPS * step):
                raise InputMismatch(
                    f"{self.name} ends after {index} frames, {end:.1f} of {announced:.1f} s: it is truncated or damaged"
                )


def _announced_end(container: InputContainer, stream: VideoStream) -> float | None:
    """When the pictures end, in seconds, according to the file's header; None if that does not say."""
    if stream.duration is not None and stream.time_base is not None:
        return float(((stream.start_time or 0) + stream.duration) * stream.time_base)
    if container.duration is not None and len(container.streams) == 1:
        return ((container.start_time or 0) + container.duration) / 1e6
    return None


# Live frames: read in a thread of its own, which never waits for the consumer.


# The queue of live frames: bounded, dropping the oldest.

T = TypeVar("T")


class Closed(Exception):
    """Nothing comes any more, and nothing is left."""


class Late(Exception):
    """Nothing came in time."""


class Latest(Generic[T]):
    """A queue of at most ``most`` (1 or more) items, which drops the oldest. One thread puts, any thread takes."""

    def __init__(self, most: int) -> None:
        self._waiting: deque[T] = deque(maxlen=most)
        self._changed = threading.Condition()
        self._ended = False
        self._error: Exception | None = None
        self.dropped = 0
        """The number of dropped items."""

    def put(self, thing: T) -> None:
        """Add an item without blocking. No effect after `end`."""
        with self._changed:
            if self._ended:
                return
            self.dropped += len(self._waiting) == self._waiting.maxlen
            self._waiting.append(thing)
            self._changed.notify_all()

    def end(self, error: Exception | None = None) -> None:
        """End the queue; ``error`` is raised once it is empty. Only the first call counts."""
        with self._changed:
            if not self._ended:
                self._ended, self._error = True, error
                self._changed.notify_all()

    def ready(self, seconds: float | None) -> bool:
        """Return whether `take` would return at once, now or within ``seconds`` (None: without limit)."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._waiting) or self._ended, seconds)

    def take(self, seconds: float | None = None) -> T:
        """Return the oldest item. Raises Late, Closed, or the error it ended with."""
        with self._changed:
            self._wait(seconds)
            return self._waiting.popleft()

    def newest(self, seconds: float | None = None) -> T:
        """Return the newest item, which stays in the queue. Raises as `take`."""
        with self._changed:
            self._wait(seconds)
            return self._waiting[-1]

    def _wait(self, seconds: float | None) -> None:
        if not self.ready(seconds):
            raise Late
        if not self._waiting:
            raise self._error or Closed


KEPT: Final = 2
"""The default number of waiting frames: with one it is the freshest, two bridge a hitch of one frame."""
LEAVE_SECONDS: Final = 1.0
"""How long `close` waits for the thread. One blocked in a device ends when that returns, or with the process."""


def live(frames: Iterable[Pixels], name: str = "camera", *, queue: int = KEPT, timeout: float | None = None) -> Live:
    """Return a source of your own camera's frames: arrays of uint8, (height, width, 3), RGB, a new one for each.

    ``frames`` is read in another thread, as fast as it gives them, until the source is closed (a generator is closed,
    too); its end ends the source, and its exception is raised at the frame's place (SystemExit and the like as
    InputMismatch). ``queue`` frames wait, and the oldest is dropped. ``timeout``: seconds without a frame after which
    it is given up (None: never).
    """
    return Live(frames, name, queue=queue, timeout=timeout)


class Live(Source):
    """The source of `live`."""

    live = True

    def __init__(
        self,
        frames: Iterable[Pixels],
        name: str,
        *,
        queue: int = KEPT,
        timeout: float | None = None,
    ) -> None:
        """Start reading. Raises SpecError for a queue of less than 1, and for text and paths."""
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
        """Return the newest frame, once one has come. Raises InputMismatch, and what the frames end with."""
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
        if self._dropped_before is None:  # frames before the first request were not dropped
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
        except BaseException as error:  # an exception would end only this thread, and the consumer would wait forever
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
"""The number of consecutive undecodable packets, as before the first whole picture, after which a stream is
given up.
"""


def camera(
    where: str | Path,
    *,
    size: tuple[int, int] | None = None,
    rate: float | None = None,
    pixel_format: str | None = None,
    queue: int = KEPT,
    timeout: float = TIMEOUT,
) -> Live:
    """Return the newest frames of a V4L2 device (``/dev/video0``) or of an address (``rtsp://``, ``http://``,
    ``tcp://`` ...).

    ``size`` (width, height), ``rate`` and ``pixel_format`` ("mjpeg", "yuyv422") are requested from a device, which may
    deliver others. ``queue`` frames wait, and the oldest is dropped. ``timeout``: seconds without a frame after which
    it is given up. Returns when the first frame is there; raises InputMismatch.
    """
    text = str(where)
    if size is not None and (len(size) != 2 or min(size) < 1):
        raise SpecError(f"size={size}: expected (width, height) in pixels")
    if not timeout > 0:
        raise SpecError(f"timeout={timeout}: must be more than 0 seconds")
    if "://" in text:
        if size or rate or pixel_format:
            raise SpecError(f"{without_password(text)}: size, rate and pixel format can be set for a device only")
        _check_address(text)
    else:
        _check_device(text)
    name = without_password(text)
    check(name)
    requested = {
        "video_size": f"{size[0]}x{size[1]}" if size else "",
        "framerate": f"{rate:g}" if rate else "",
        "input_format": pixel_format or "",
    }
    options = {key: value for key, value in requested.items() if value}
    source = Live(_frames(text, name, options, timeout), name, queue=queue, timeout=2 * timeout)
    try:
        source.first()
    except BaseException:
        source.close()
        raise
    return source


def is_camera(text: str) -> bool:
    """Return whether a word names a camera, valid or not: an address, or a device."""
    return "://" in text or text.startswith(("/dev/video", "/dev/v4l/")) or Path(text).is_char_device()


def without_password(address: str) -> str:
    """Return an address as it may be shown: without a password, and without anything after "?".

    A password may contain what ends a host. So, unless only a host precedes the first "/" (and no further address
    follows it), everything from the first ":" to the last "@" is hidden; with a "?" in between, also what follows the
    "@": it may be part of the query.
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
    """Runs in the reading thread. Ends only by an error, because cameras have no end."""
    scheme, address, rest = text.partition("://")
    scheme = scheme.lower()
    if address:
        text = f"{scheme}://{rest}"  # FFmpeg's schemes are in lower case
        options = {"fflags": "nobuffer"}
    if scheme.startswith("rtsp"):
        options = {**options, "rtsp_transport": "tcp"}  # works through firewalls, and loses no packets
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
    # A device's packets are its own memory. None may outlive it, so they stay inside, and only copies are returned.
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


def open_source(
    words: Sequence[str],
    *,
    size: tuple[int, int] | None = None,
    rate: float | None = None,
    pixel_format: str | None = None,
    queue: int | None = None,
) -> Source:
    """Files, folders, globs and videos, one after the other; or one camera, to which the keywords apply.

    Raises SpecError, and InputMismatch for what cannot be read.
    """
    cameras = [word for word in words if is_camera(word)]
    if cameras and len(words) > 1:
        raise SpecError("a camera never ends, so it is the only input: give one camera, or files and videos")
    if cameras:
        kept = KEPT if queue is None else queue
        return camera(cameras[0], size=size, rate=rate, pixel_format=pixel_format, queue=kept)
    if size or rate or pixel_format or queue:
        of_it = either("--camera-...", "size, rate and pixel_format")
        raise SpecError(
            f"{option('queue')} and {of_it} are for a camera: files and videos wait, and nothing is dropped"
        )
    parts: list[Source] = []
    files: list[str] = []
    for word in words:
        videos = _videos(word)
        if videos:
            parts += _files(files)
            files = []
            parts += [video(path) for path in videos]
        else:
            files.append(word)
    parts += _files(files)
    return parts[0] if len(parts) == 1 else SeveralSources(parts)


class SeveralSources(Source):
    """Finite sources, one after the other; one that breaks off does not prevent the later ones."""

    def __init__(self, parts: Sequence[Source]) -> None:
        super().__init__(", ".join(part.name for part in parts))
        self._parts = parts

    def first(self) -> Item:
        return self._parts[0].first()

    def _items(self) -> Iterator[Item]:
        for part in self._parts:
            try:
                yield from part
            except InputMismatch as error:
                self.broken.append(error)
        if self.broken:
            raise InputMismatch("; ".join(map(str, self.broken)))


def _files(words: Sequence[str]) -> list[Files]:
    return [folder(*words)] if words else []


def _videos(word: str) -> list[Path]:
    """Return the videos that a word names: one, or those of a folder or a pattern that holds no other input."""
    path = Path(word)
    if path.is_dir():
        found = sorted(path.iterdir())
    elif glob.has_magic(word) and not path.exists():
        found = [Path(match) for match in sorted(glob.glob(word, recursive=True))]
    else:
        return [path] if _is_video(path) else []
    # imports torch, which a camera does not need
    from shared_hooks.models.inputs import IMAGE_SUFFIXES, TENSOR_SUFFIXES

    others = {one.suffix.lower() for one in found} & (IMAGE_SUFFIXES | TENSOR_SUFFIXES)
    return [] if others else [one for one in found if _is_video(one)]


def _is_video(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.is_dir()
