"""Frames out of PyAV, and its errors by name."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from shared_hooks.errors import InputMismatch
from shared_hooks.models.frames import Pixels

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

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
