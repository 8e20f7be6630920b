"""Image files decoded in a process of its own, where limits of memory and time hold whatever the decoder does.

A file may come from a stranger, and announce little and take much: a tile of gigabytes, thousands of scans. Headers are
looked at before anything is decoded; what nobody thought of ends the process, not its parent. It is used again for as
long as it behaves. This file is also the process's program (`python picture.py`), and loads Pillow and nothing else of
ours, so that it starts in a fraction of a second.

Between the two: JSON in a line, then bytes. To the process {"bytes", "how"} and the file; back {"size", "mode",
"bytes"} and the pixels, or {"error", "message"}.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch

from shared_hooks.config import Table
from shared_hooks.errors import InputMismatch, near

if TYPE_CHECKING:
    from PIL import Image


IMAGE_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""The only decoders that files reach: of Pillow's others, one starts Ghostscript."""
MAX_PIXELS = 25_000_000
"""Most pixels of an image from elsewhere; what is compressed well may take seconds to decode."""
MAX_OWN_PIXELS = 89_478_485
"""Most pixels of an image of one's own: where Pillow begins to warn."""
MAX_SCANS = 200
"""Most scans of a JPEG; a progressive one has some ten."""
MAX_TAGS = 1000
"""Most tags of a TIFF."""
SECONDS = 10.0
SPARE_BYTES = 192 << 20
"""Address space beside what the pixels take: the decoders' own libraries and tables."""
BYTES_A_PIXEL = 16
"""As decoded, converted, turned and scaled: four copies of four bytes."""


class How(TypedDict):
    """What becomes of an image, as `ImagePreprocess` says: ``size`` is (height, width)."""

    mode: str
    size: tuple[int, int] | None
    shorter_side: int | None
    interpolation: str
    max_pixels: int


class Refused(Exception):
    """Why a file is not decoded; ``kind`` is an error's name."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def scaled(width: int, height: int, shorter_side: int | None) -> tuple[int, int]:
    """The size of an image before it is cropped: one that is long and thin becomes large."""
    if shorter_side is None or not width or not height:
        return width, height
    factor = shorter_side / min(width, height)
    return round(width * factor), round(height * factor)


def resized(
    image: Image.Image, size: tuple[int, int] | None, shorter_side: int | None, interpolation: str
) -> Image.Image:
    """Straight to ``size``; or the shorter side to ``shorter_side``, and a crop from the middle."""
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
    """Raises `Refused`, before anything is decoded where a header says enough."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    check = partial(_check_size, how["max_pixels"])
    if (announced := _webp_size(data)) is not None:
        check(*announced, "an image")  # its decoder takes memory for all of it as soon as it opens the file
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a file of thousands of tags warns of each
            with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as file:
                _check(file, data, how, check)
                turned = ImageOps.exif_transpose(file).convert(how["mode"])
                return resized(turned, how["size"], how["shorter_side"], how["interpolation"])
    except UnidentifiedImageError:  # whose own text names an object in memory
        raise Refused("unknown", "its format is not known (images, .npy and .safetensors are read)") from None
    except (OSError, ValueError, SyntaxError, TypeError, KeyError, IndexError, Image.DecompressionBombError) as error:
        raise Refused("broken", str(error)[:300]) from error


def _check_size(most: int, width: int, height: int, what: str) -> None:
    if width * height > most:
        raise Refused("TooLarge", f"{what} of {width} x {height} pixels; at most {most} are taken")


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """Width and height that the first chunk of a WebP file announces (RFC 9649); None for other files."""
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
        raise Refused("deep", f"has pixels of more than 8 bits (mode {file.mode}); convert it, or give it as .npy")
    if file.format == "JPEG" and data.count(b"\xff\xda") > MAX_SCANS:
        raise Refused("TooLarge", f"a JPEG of more than {MAX_SCANS} scans")
    if file.format == "TIFF":
        tags: Any = getattr(file, "tag_v2", {})
        if len(tags) > MAX_TAGS:
            raise Refused("TooLarge", f"a TIFF of more than {MAX_TAGS} tags")
        width, length, rows = tags.get(322, 0), tags.get(323, 0), tags.get(278, 0)
        if all(type(one) is int for one in (width, length, rows)):
            check(width, length, "a tile")
            check(file.width, min(rows, file.height), "a strip")


class Decoder:
    """Processes that decode, each one file at a time; started when they are needed. Any thread may call.

    ``seconds``: for one file, by the clock.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._idle: list[_Process] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def close(self) -> None:
        """Ends the processes that have nothing to do."""
        with self._lock:
            idle, self._idle = self._idle if self._pid == os.getpid() else [], []
        for process in idle:
            process.end()

    def __call__(self, data: bytes, how: How) -> tuple[str, tuple[int, int], bytes]:
        """(mode, (width, height), pixels). Raises `Refused`."""
        with self._lock:
            if self._pid != os.getpid():  # the processes are a parent's
                self._idle, self._pid = [], os.getpid()
            process = self._idle.pop() if self._idle else None
        if process is not None and not process.fits(how):
            process.end()
            process = None
        if process is None:
            process = _Process(how["max_pixels"])
        try:
            said, pixels = process.ask(data, how, time.monotonic() + self.seconds)
        except BaseException as error:  # interrupted, too: it is in the middle of something
            process.end()
            if isinstance(error, TimeoutError):
                raise Refused("TooLarge", f"decoding it takes more than {self.seconds:g} s") from None
            if isinstance(error, OSError):
                raise Refused("TooLarge", f"decoding it takes more than {process.limit >> 20} MiB, or fails") from None
            raise
        if said.get("again"):
            with self._lock:
                self._idle.append(process)
        else:
            process.end()
        if "error" in said:
            raise Refused(said["error"], said["message"])
        return said["mode"], tuple(said["size"]), pixels


class _Process:
    """One of them."""

    def __init__(self, max_pixels: int) -> None:
        self.max_pixels = max_pixels
        self.limit = SPARE_BYTES + BYTES_A_PIXEL * max_pixels
        self._process = subprocess.Popen(
            [sys.executable, "-I", os.path.abspath(__file__), str(self.limit)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]

    def fits(self, how: How) -> bool:
        return self.max_pixels == how["max_pixels"] and self._process.poll() is None

    def ask(self, data: bytes, how: How, until: float) -> tuple[dict[str, Any], bytes]:
        """What it says. Raises TimeoutError, and OSError where it has ended."""
        assert self._process.stdin is not None
        head = json.dumps({"bytes": len(data), "how": how}).encode() + b"\n"
        for part in (head, memoryview(data)):
            while len(part):
                part = part[self._process.stdin.write(part) :]
        line, rest = self._line(until)
        said = json.loads(line)
        return said, self._exactly(rest, int(said.get("bytes", 0)), until)

    def _some(self, until: float, most: int) -> bytes:
        assert self._process.stdout is not None
        while not self._selector.select(0.05):  # often enough for who interrupts this thread
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
        """At once, whatever it does."""
        self._selector.close()
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]


decode = Decoder()
"""Those of this process."""
atexit.register(decode.close)


def _limited(nbytes: int) -> None:
    """From here on this process takes ``nbytes`` of address space more than it has, and no core is kept."""
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
    """Decodes what comes, until nothing comes any more."""
    from PIL import Image, ImageOps

    Image.init()
    del ImageOps
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    _limited(int(sys.argv[1]))
    while line := source.readline():
        asked = json.loads(line)
        data, again = source.read(asked["bytes"]), True
        pixels = b""
        try:
            image = decoded(data, asked["how"])
            pixels = image.tobytes()
            said: dict[str, Any] = {"mode": image.mode, "size": image.size}
        except Refused as error:
            said = {"error": error.kind, "message": str(error)}
        except MemoryError:
            said, again = {"error": "TooLarge", "message": f"decoding it takes more than {sys.argv[1]} bytes"}, False
        except Exception as error:  # a decoder's own: nothing of it is to be used again
            said, again = {"error": "broken", "message": f"{type(error).__name__}: {error}"[:300]}, False
        sink.write(json.dumps({**said, "bytes": len(pixels), "again": again}).encode() + b"\n")
        sink.write(pixels)
        sink.flush()
        image = None  # type: ignore[assignment]
        if not again:
            return


if __name__ == "__main__":
    main()


# Boxes, masks and classes of pixels drawn on the picture that a model saw, as a spec's [draw] says where they are.
#
# [draw] boxes = "0.boxes" # names and positions on the way into the output; (n, 4) scores = "0.scores" # (n), or
# scores of classes (n, classes) labels = "0.labels" # classes (n); absent: the best of the scores masks = "0.masks" #
# (n, H, W) or (n, 1, H, W), 0 to 1 classes = "out" # of each pixel: scores (classes, H, W), or the class itself (H,
# W) format = "xyxy" # or xywh, cxcywh unit = "pixels" # of the model's input; or "fraction", 0 to 1 threshold = 0.5 #
# the least score background = -1 # a class of the scores that is no object, or of the pixels that is left clear


COLOURS = ((230, 25, 75), (60, 180, 75), (0, 130, 200), (245, 130, 48), (145, 30, 180), (70, 240, 240), (240, 50, 230))
"""One for each class, again from the first after the last."""
OPACITY = 0.5


@dataclass(frozen=True)
class Drawing:
    """Where in an output is what can be drawn; a leading batch of one is left out."""

    boxes: str | None = None
    scores: str | None = None
    labels: str | None = None
    masks: str | None = None
    classes: str | None = None
    format: str = "xyxy"
    unit: str = "pixels"
    threshold: float = 0.5
    background: int | None = None

    @classmethod
    def from_table(cls, table: Table) -> Drawing:
        """Drawing as a spec's [draw] says. Raises SpecError."""
        paths = {name: table.take(name, str) for name in ("boxes", "scores", "labels", "masks", "classes")}
        threshold = table.take("threshold", float)
        made = cls(
            **paths,
            format=table.choice("format", ("xyxy", "xywh", "cxcywh"), "xyxy"),
            unit=table.choice("unit", ("pixels", "fraction"), "pixels"),
            threshold=0.5 if threshold is None else threshold,
            background=table.take("background", int),
        )
        table.done()
        if made.boxes is None and made.masks is None and made.classes is None:
            table.fail("boxes", "missing; expected where boxes, masks or classes are in the output")
        return made

    def __call__(self, output: object, picture: Image.Image, names: tuple[str, ...]) -> Image.Image:
        """``picture`` with what was found on it; ``names`` of classes. Raises InputMismatch where the output holds no
        such thing.
        """
        drawn = picture.convert("RGB")
        if self.classes is not None:
            drawn = self._pixels(drawn, _array(output, self.classes))
        boxes = None if self.boxes is None else _shaped(_array(output, self.boxes), 2, self.boxes)
        masks = None if self.masks is None else _masks(_array(output, self.masks), self.masks)
        count = len(boxes) if boxes is not None else len(masks) if masks is not None else 0
        if (boxes is not None and boxes.shape[1] != 4) or (masks is not None and len(masks) != count):
            shapes = ", ".join(str(one.shape) for one in (boxes, masks) if one is not None)
            raise InputMismatch(f"draw: expected (n, 4) boxes and as many masks, found {shapes}")
        scores, labels = self._judged(output, count)
        for at in np.flatnonzero((scores >= self.threshold) & (labels >= 0)).tolist():
            colour = COLOURS[labels[at] % len(COLOURS)]
            if masks is not None:
                drawn = _tinted(drawn, masks[at] > 0.5, colour)
            if boxes is not None and np.isfinite(boxes[at]).all():
                name = names[labels[at]] if labels[at] < len(names) else str(labels[at])
                _box(drawn, self._corners(boxes[at], drawn), colour, f"{name} {scores[at]:.2f}")
        return drawn

    def _judged(self, output: object, count: int) -> tuple[Any, Any]:
        """Score and class of each; class -1 is none."""
        scores, labels = np.ones(count), np.zeros(count, dtype=np.int64)
        if self.scores is not None:
            scores = _array(output, self.scores)
            if scores.ndim == 3 or scores.shape == (1, count):
                scores = scores[0]
            if scores.ndim == 2 and scores.shape[1]:
                shares = np.exp(scores - scores.max(axis=1, keepdims=True))
                shares /= shares.sum(axis=1, keepdims=True)
                labels, scores = shares.argmax(axis=1), shares.max(axis=1)
                if self.background is not None:
                    labels = np.where(labels == self.background % shares.shape[1], -1, labels)
        if self.labels is not None:
            labels = _shaped(_array(output, self.labels), 1, self.labels).astype(np.int64)
        if scores.shape != (count,) or labels.shape != (count,):
            raise InputMismatch(
                f"draw: {count} were found, with scores of shape {scores.shape} and labels of shape {labels.shape}"
            )
        return scores, labels

    def _corners(self, box: Any, picture: Image.Image) -> list[int]:
        a, b, c, d = (float(value) for value in box)
        if self.format == "xywh":
            c, d = a + c, b + d
        elif self.format == "cxcywh":
            a, b, c, d = a - c / 2, b - d / 2, a + c / 2, b + d / 2
        wide, high = picture.size if self.unit == "fraction" else (1, 1)
        most = max(picture.size) * 4.0  # what lies further out is not seen, and a library's integers end somewhere
        left, right = sorted(round(min(max(value * wide, -most), most)) for value in (a, c))
        top, bottom = sorted(round(min(max(value * high, -most), most)) for value in (b, d))
        return [left, top, right, bottom]

    def _pixels(self, picture: Image.Image, classes: Any) -> Image.Image:
        clear = self.background
        if classes.ndim == 4 or (classes.ndim == 3 and classes.shape[0] == 1):
            classes = classes[0]
        if classes.ndim == 3:
            clear = None if clear is None else clear % classes.shape[0]
            classes = classes.argmax(axis=0)
        classes = _shaped(classes, 2, str(self.classes)).astype(np.int64)
        for number in np.unique(classes).tolist():
            if number != clear:
                picture = _tinted(picture, classes == number, COLOURS[number % len(COLOURS)])
        return picture


def entry(output: object, path: str) -> object:
    """What the names and positions of ``path``, with dots between, lead to. Raises InputMismatch."""
    found = output
    for word in path.split("."):
        if isinstance(found, Mapping):
            known = {str(key): value for key, value in found.items()}
        elif isinstance(found, (tuple, list)) and not hasattr(found, "_fields"):
            known = {str(at): value for at, value in enumerate(found)}
        else:
            known = {name: value for name, value in _attributes(found).items() if not name.startswith("_")}
        if word not in known:
            there = ", ".join([*known][:8]) or type(found).__name__
            raise InputMismatch(f'draw: "{path}" is not in the output: there is {there}.{near(word, known)}')
        found = known[word]
    return found


def _attributes(value: object) -> dict[str, Any]:
    fields = getattr(value, "_fields", None)
    if isinstance(value, torch.Tensor):
        return {}
    return {name: getattr(value, name) for name in fields} if fields else dict(getattr(value, "__dict__", {}))


def _array(output: object, path: str) -> Any:
    found = entry(output, path)
    if not isinstance(found, torch.Tensor) or found.is_complex():
        raise InputMismatch(f'draw: "{path}" is {type(found).__name__}; expected a tensor of real numbers')
    return np.nan_to_num(found.detach().cpu().to(torch.float32).numpy(), nan=-1.0)


def _shaped(array: Any, rank: int, path: str) -> Any:
    """Without a leading batch of one."""
    if array.ndim == rank + 1 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != rank:
        raise InputMismatch(f'draw: "{path}": expected {rank} dimensions, found {array.shape}')
    return array


def _masks(array: Any, path: str) -> Any:
    """(n, H, W), of that with a batch of one before it, or one channel in each."""
    if array.ndim == 4 and array.shape[1] == 1:
        return array[:, 0]
    return _shaped(array, 3, path)


def _tinted(picture: Image.Image, where: Any, colour: tuple[int, int, int]) -> Image.Image:
    from PIL import Image

    mask = Image.fromarray((where * (255 * OPACITY)).astype(np.uint8)).resize(picture.size, Image.Resampling.NEAREST)
    return Image.composite(Image.new("RGB", picture.size, colour), picture, mask)


def _box(picture: Image.Image, corners: list[int], colour: tuple[int, int, int], text: str) -> None:
    from PIL import ImageDraw

    pen = ImageDraw.Draw(picture)
    pen.rectangle(corners, outline=colour, width=max(1, max(picture.size) // 300))
    at = (max(corners[0], 0), max(corners[1] - 11, 0))
    shown = text.encode("latin-1", "replace").decode("latin-1")  # what the built-in font has
    pen.rectangle(pen.textbbox(at, shown), fill=colour)
    pen.text(at, shown, fill=(255, 255, 255))
