"""A video file, frame by frame; nothing is dropped."""

from __future__ import annotations

import errno
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from edge_client.sources import source
from edge_client.sources.source import Source
from shared_hooks.errors import InputMismatch, near
from shared_hooks.frames import Frame, FrameId, Pixels

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream


# Frames out of PyAV, and its errors by name.


FILE_FORMATS: Final = (
    "mov,mp4,matroska,webm,avi,mpegts,mpeg,mpegvideo,h264,hevc,av1,ivf,mjpeg,mpjpeg,flv,asf,ogg,mxf,m4v,h263"
)
"""Formats that FFmpeg may read. Others read lists of further files, or draw pictures of their own."""
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
    """A file, device or address, and its first video stream. ``name`` is what messages call it.

    ``protocols``, ``formats``: all that FFmpeg may open for it, whatever the file says. ``timeout``: seconds, to open
    and for each packet. ``quick``: frames come at once; else the decoder takes several at a time on several processors.
    Raises InputMismatch.
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
        context.options = {"max_pixels": str(MAX_PIXELS)}  # should it change on the way
        if quick:
            context.thread_type = "SLICE"
            context.options = {**context.options, "flags": "+low_delay"}
        else:
            context.thread_type = "AUTO"
        yield container, stream


@contextmanager
def naming_errors(name: str, timeout: float | None = None, *, opening: bool = False) -> Iterator[None]:
    """What PyAV raises, as InputMismatch about ``name``. FFmpeg's own words may hold a password, so only its reason is
    said.
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
            # Some of FFmpeg's readers call it bad data when the timeout ends them.
            if timeout is not None and (ended or (opening and time.monotonic() - began >= timeout)):
                reason = f"nothing came within {timeout:g} s"
            elif ended:
                pass  # by something else: FFmpeg's own words
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
    """Decoded frame -> RGB in memory of its own, turned as its display matrix says (telephones). For one thread."""

    def __init__(self) -> None:
        from av.video.reformatter import VideoReformatter

        self._reformatter = VideoReformatter()

    def __call__(self, frame: VideoFrame) -> Pixels:
        rgb = self._reformatter.reformat(frame, format="rgb24")
        pixels = cast(Pixels, rgb.to_ndarray())
        if rgb is frame:  # as it came, so the array may be memory of the device
            pixels = pixels.copy()
        turns = round(frame.rotation / 90) % 4
        return np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels


SUFFIXES: Final = frozenset(
    f".{kind}"
    for kind in "mp4 m4v mov mkv webm avi ts mts m2ts mpg mpeg flv wmv ogv 3gp mxf ivf h264 hevc mjpeg mjpg".split()
)
"""By which a file is known as a video."""
MISSING_SECONDS: Final = 0.75
MISSING_STEPS: Final = 1.5
"""What may be missing of the time that a file announces, or it is called truncated: so many seconds (sound, and edits
of a few frames, may last longer than the pictures), or so many of the longest step from one picture to the next (some
containers do not say how long the last one is shown).
"""


def video(path: str | Path) -> Video:
    """The frames of a video file, in the order in which they are shown.

    Raises InputMismatch for a file without a readable frame; later, at its place, for one that ends early.
    """
    return Video(Path(path))


class Video(Source):
    """Decoded in the thread that takes the frames, as it takes them; each iteration starts again."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path
        if not path.exists():
            siblings = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
            raise InputMismatch(f"no such input: {path}.{near(path.name, siblings)}")
        if not path.is_file():
            raise InputMismatch(f"{path} is no file")
        source.check(str(path))
        from shared_hooks.models.inputs import truth_of  # which loads torch: a camera needs none

        self._truth = truth_of(path)
        self.first()

    def first(self) -> Frame:
        """Decoded again: of many videos, each would keep one for the whole run."""
        with closing(self._items()) as frames:
            return next(frames)

    def _items(self) -> Generator[Frame, None, None]:
        where = f"file:{self.path}"  # so that a colon in a name is no protocol
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
            # step: none known where there is one picture, which may be shown for any time
            if announced is not None and step and end < announced - max(MISSING_SECONDS, MISSING_STEPS * step):
                raise InputMismatch(
                    f"{self.name} ends after {index} frames, {end:.1f} of {announced:.1f} s: it is truncated or damaged"
                )


def _announced_end(container: InputContainer, stream: VideoStream) -> float | None:
    """When the pictures end, in seconds, as the file's head says; None where it says nothing of them alone."""
    if stream.duration is not None and stream.time_base is not None:
        return float(((stream.start_time or 0) + stream.duration) * stream.time_base)
    if container.duration is not None and len(container.streams) == 1:
        return ((container.start_time or 0) + container.duration) / 1e6
    return None
