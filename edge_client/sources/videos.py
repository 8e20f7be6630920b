"""A video file, frame by frame; nothing is dropped."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edge_client.sources import extras
from edge_client.sources.decoding import ToPixels, naming_errors, opened
from edge_client.sources.source import Source
from shared_hooks.errors import InputMismatch, near
from shared_hooks.models.frames import Frame, FrameId
from shared_hooks.models.inputs import truth_of

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

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
        extras.check(str(path))
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
