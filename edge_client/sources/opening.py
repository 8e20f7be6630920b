"""Which source the words of a command line name."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path

from edge_client.sources.cameras import KEPT, camera, is_camera
from edge_client.sources.source import Files, Item, Source, folder
from edge_client.sources.videos import SUFFIXES, video
from edge_client.spoken import either, option
from shared_hooks.errors import InputMismatch, SpecError
from shared_hooks.models.inputs import IMAGE_SUFFIXES, TENSOR_SUFFIXES


def open_source(
    words: Sequence[str],
    *,
    size: tuple[int, int] | None = None,
    rate: float | None = None,
    pixel_format: str | None = None,
    queue: int | None = None,
) -> Source:
    """Files, folders, globs and videos, one after the other; or one camera, which alone takes the keywords.

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
    return parts[0] if len(parts) == 1 else Several(parts)


class Several(Source):
    """Sources that end, one after the other; one that breaks off does not keep back those after it."""

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
    """The videos that a word names: one, or those of a folder or a pattern that holds no other input."""
    path = Path(word)
    if path.is_dir():
        found = sorted(path.iterdir())
    elif glob.has_magic(word) and not path.exists():
        found = [Path(match) for match in sorted(glob.glob(word, recursive=True))]
    else:
        return [path] if _is_video(path) else []
    others = {one.suffix.lower() for one in found} & (IMAGE_SUFFIXES | TENSOR_SUFFIXES)
    return [] if others else [one for one in found if _is_video(one)]


def _is_video(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.is_dir()
