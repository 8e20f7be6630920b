"""Decode image files in a separate process, with limits of memory and time whatever the decoder does.

A file may be untrusted, and announce little and take much: a tile of gigabytes, thousands of scans. Headers are checked
before anything is decoded; anything unforeseen ends the process, not its parent. It is reused while it behaves. This
file is also the process's program (`python picture.py`), and loads Pillow and nothing else of ours, so that it starts
in a fraction of a second.

The protocol: JSON in a line, then bytes. To the process {"bytes", "how"} and the file; back {"size", "mode", "bytes"}
and the pixels, or {"error", "message"}.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import selectors
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from PIL import Image


IMAGE_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""The only decoders used: one of Pillow's others starts Ghostscript."""
MAX_PIXELS = 25_000_000
"""Maximum pixels of an untrusted image: highly compressed ones may take seconds to decode."""
MAX_OWN_PIXELS = 89_478_485
"""Maximum pixels of the user's own image: where Pillow begins to warn."""
MAX_SCANS = 200
"""Maximum scans of a JPEG; a progressive one has about ten."""
MAX_TAGS = 1000
"""Maximum tags of a TIFF."""
SECONDS = 10.0
SPARE_BYTES = 192 << 20
"""Address space beside the pixels: the decoders' own libraries and tables."""
BYTES_A_PIXEL = 16
"""Decoded, converted, rotated and scaled: four copies of four bytes."""


class How(TypedDict):
    """How to process an image, as in `ImagePreprocess`: ``size`` is (height, width)."""

    mode: str
    size: tuple[int, int] | None
    shorter_side: int | None
    interpolation: str
    max_pixels: int


class PictureRefused(Exception):
    """Why a file is not decoded; ``kind`` is an error's name."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def scaled(width: int, height: int, shorter_side: int | None) -> tuple[int, int]:
    """Return the size of an image before cropping: a long and thin one becomes large."""
    if shorter_side is None or not width or not height:
        return width, height
    factor = shorter_side / min(width, height)
    return round(width * factor), round(height * factor)


def resized(
    image: Image.Image, size: tuple[int, int] | None, shorter_side: int | None, interpolation: str
) -> Image.Image:
    """Resize directly to ``size``; or the shorter side to ``shorter_side``, with a centre crop."""
    if size is None:
        return image
    from PIL import Image

    height, width = size
    resample = Image.Resampling[interpolation.upper()]
    if shorter_side is None:
        return image if image.size == (width, height) else image.resize((width, height), resample)
    found = image.resize(scaled(*image.size, shorter_side), resample)
    left, top = (found.width - width) // 2, (found.height - height) // 2
    return found.crop((left, top, left + width, top + height))


def decoded(data: bytes, how: How) -> Image.Image:
    """Decode an image. Raises `PictureRefused`, before decoding if the header shows enough."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    check = partial(_check_size, how["max_pixels"])
    if (announced := _webp_size(data)) is not None:
        check(*announced, "an image")  # its decoder allocates memory for all of it on opening the file
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a file with thousands of tags warns of each
            with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as file:
                _check(file, data, how, check)
                turned = ImageOps.exif_transpose(file).convert(how["mode"])
                return resized(turned, how["size"], how["shorter_side"], how["interpolation"])
    except UnidentifiedImageError:  # whose message contains an object's address
        raise PictureRefused("unknown", "its format is not known (images, .npy and .safetensors are read)") from None
    except (OSError, ValueError, SyntaxError, TypeError, KeyError, IndexError, Image.DecompressionBombError) as error:
        raise PictureRefused("broken", str(error)[:300]) from error


def _check_size(most: int, width: int, height: int, what: str) -> None:
    if width * height > most:
        raise PictureRefused("TooLarge", f"{what} of {width} x {height} pixels; at most {most} are taken")


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """Return width and height from the first chunk of a WebP file (RFC 9649); None for other files."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return None
    number = partial(int.from_bytes, byteorder="little")
    if data[12:16] == b"VP8X":
        return 1 + number(data[24:27]), 1 + number(data[27:30])
    if data[12:16] == b"VP8L":
        bits = number(data[21:25])
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return number(data[26:28]) & 0x3FFF, number(data[28:30]) & 0x3FFF


def _check(file: Image.Image, data: bytes, how: How, check: Callable[[int, int, str], None]) -> None:
    check(file.width, file.height, "an image")
    check(*scaled(file.width, file.height, how["shorter_side"]), "a scaled image")
    if file.mode.startswith(("I", "F")):
        raise PictureRefused(
            "deep", f"has pixels of more than 8 bits (mode {file.mode}); convert it, or give it as .npy"
        )
    if file.format == "JPEG" and data.count(b"\xff\xda") > MAX_SCANS:
        raise PictureRefused("TooLarge", f"a JPEG of more than {MAX_SCANS} scans")
    if file.format == "TIFF":
        tags: Any = getattr(file, "tag_v2", {})
        if len(tags) > MAX_TAGS:
            raise PictureRefused("TooLarge", f"a TIFF of more than {MAX_TAGS} tags")
        width, length, rows = tags.get(322, 0), tags.get(323, 0), tags.get(278, 0)
        if all(type(one) is int for one in (width, length, rows)):
            check(width, length, "a tile")
            check(file.width, min(rows, file.height), "a strip")


class Decoder:
    """Processes that decode one file at a time each, started on demand. Thread-safe.

    ``seconds``: wall time limit of one file.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._idle: list[_Process] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def close(self) -> None:
        """End the idle processes."""
        with self._lock:
            idle, self._idle = self._idle if self._pid == os.getpid() else [], []
        for process in idle:
            process.end()

    def __call__(self, data: bytes, how: How) -> tuple[str, tuple[int, int], bytes]:
        """Return (mode, (width, height), pixels). Raises `PictureRefused`."""
        with self._lock:
            if self._pid != os.getpid():  # the processes belong to a parent
                self._idle, self._pid = [], os.getpid()
            process = self._idle.pop() if self._idle else None
        if process is not None and not process.fits(how):
            process.end()
            process = None
        if process is None:
            process = _Process(how["max_pixels"])
        try:
            reported, pixels = process.send(data, how, time.monotonic() + self.seconds)
        except BaseException as error:  # interrupted, too: it is in an unknown state
            process.end()
            if isinstance(error, TimeoutError):
                raise PictureRefused("TooLarge", f"decoding it takes more than {self.seconds:g} s") from None
            if isinstance(error, OSError):
                raise PictureRefused(
                    "TooLarge", f"decoding it takes more than {process.limit >> 20} MiB, or fails"
                ) from None
            raise
        if reported.get("again"):
            with self._lock:
                self._idle.append(process)
        else:
            process.end()
        if "error" in reported:
            raise PictureRefused(reported["error"], reported["message"])
        return reported["mode"], tuple(reported["size"]), pixels


class _Process:
    """One decoding process."""

    def __init__(self, max_pixels: int) -> None:
        self.max_pixels = max_pixels
        self.limit = SPARE_BYTES + BYTES_A_PIXEL * max_pixels
        self._process = subprocess.Popen(
            [sys.executable, "-I", os.path.abspath(__file__), str(self.limit)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # a server that drains on Ctrl-C still needs it
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]

    def fits(self, how: How) -> bool:
        return self.max_pixels == how["max_pixels"] and self._process.poll() is None

    def send(self, data: bytes, how: How, until: float) -> tuple[dict[str, Any], bytes]:
        """Send a file and return the reply. Raises TimeoutError, and OSError if the process has ended."""
        assert self._process.stdin is not None
        head = json.dumps({"bytes": len(data), "how": how}).encode() + b"\n"
        for part in (head, memoryview(data)):
            while len(part):
                part = part[self._process.stdin.write(part) :]
        line, rest = self._line(until)
        reported = json.loads(line)
        return reported, self._exactly(rest, int(reported.get("bytes", 0)), until)

    def _some(self, until: float, most: int) -> bytes:
        assert self._process.stdout is not None
        while not self._selector.select(0.05):  # often enough for an interruption of this thread
            if time.monotonic() > until:
                raise TimeoutError
        found = os.read(self._process.stdout.fileno(), most)
        if not found:
            raise BrokenPipeError("the process that decodes has ended")
        return found

    def _line(self, until: float) -> tuple[bytes, bytes]:
        found = b""
        while b"\n" not in found:
            found += self._some(until, 1 << 16)
        line, _, rest = found.partition(b"\n")
        return line, rest

    def _exactly(self, found: bytes, nbytes: int, until: float) -> bytes:
        parts, due = [found], nbytes - len(found)
        while due > 0:
            parts.append(self._some(until, min(due, 1 << 20)))
            due -= len(parts[-1])
        return b"".join(parts)

    def end(self) -> None:
        """Kill the process."""
        self._selector.close()
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


decode = Decoder()
"""The decoder of this process."""
atexit.register(decode.close)


def _limited(nbytes: int) -> None:
    """Limit this process's further address space to ``nbytes``, and disable core dumps."""
    try:
        import resource
    except ImportError:  # not on this system
        return
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm", encoding="ascii") as file:
            nbytes += int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Decode files until the input ends."""
    from PIL import Image, ImageOps

    Image.init()
    del ImageOps
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    _limited(int(sys.argv[1]))
    while line := source.readline():
        requested = json.loads(line)
        data, again = source.read(requested["bytes"]), True
        pixels = b""
        try:
            image = decoded(data, requested["how"])
            pixels = image.tobytes()
            reported: dict[str, Any] = {"mode": image.mode, "size": image.size}
        except PictureRefused as error:
            reported = {"error": error.kind, "message": str(error)}
        except MemoryError:
            reported, again = (
                {"error": "TooLarge", "message": f"decoding it takes more than {sys.argv[1]} bytes"},
                False,
            )
        except Exception as error:  # a decoder's own: the process is not reused
            reported, again = {"error": "broken", "message": f"{type(error).__name__}: {error}"[:300]}, False
        sink.write(json.dumps({**reported, "bytes": len(pixels), "again": again}).encode() + b"\n")
        sink.write(pixels)
        sink.flush()
        image = None  # type: ignore[assignment]
        if not again:
            return


if __name__ == "__main__":
    main()
