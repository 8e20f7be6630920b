"""A camera: a V4L2 device of this machine, or a stream from the network."""

from __future__ import annotations

import glob
import re
import stat
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from edge_client.sources import extras
from edge_client.sources.decoding import LIVE_FORMATS, ToPixels, naming_errors, opened
from edge_client.sources.live_source import KEPT, Live
from shared_hooks.errors import InputMismatch, SpecError
from shared_hooks.models.frames import Pixels

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

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
    extras.check(name)
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
