"""What `edge-client run` is fed with: the source that --input names, and where the run stands in it."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TypeAlias

from edge_client.modes import CLOUD_FILE
from edge_client.sources import Item, Source, Tally
from edge_client.sources.files import Files
from edge_client.sources.opening import open_source
from shared_hooks.errors import InputMismatch, SpecError
from shared_hooks.models import Frame, FrameId, InputItem

Named: TypeAlias = InputItem | FrameId
"""An input without its content, for what is reported of it afterwards."""


class Feed:
    """A source's inputs for one `infer_many`, ``most`` of them (None: all); `close` closes the source."""

    def __init__(self, source: Source, most: int | None = None) -> None:
        self.source = source
        self.most = most
        self.items: list[InputItem] | None = source.items if isinstance(source, Files) else None
        """All of them where they are files, known beforehand; may be replaced by fewer before the run."""
        self.under_way: deque[Named] = deque()
        """Taken, and not yet answered."""
        self.tally = Tally(source)
        self._done = 0

    @property
    def samples(self) -> Sequence[Item]:
        """What can be planned on beforehand: all files, or the first frame."""
        return [self.source.first()] if self.items is None else self.items

    @property
    def broken(self) -> Sequence[InputMismatch]:
        """Why the source ended early, or several of them."""
        return self.source.broken

    @property
    def live(self) -> bool:
        """As of the source."""
        return self.source.live

    def wait_for_input(self, seconds: float) -> bool:
        """As of the source."""
        return self.source.wait_for_input(seconds)

    def __iter__(self) -> Iterator[Item]:
        """Ends where the source breaks off, too: `broken` says why."""
        with suppress(InputMismatch):
            for number, item in enumerate(self.source if self.items is None else self.items, 1):
                self.under_way.append(item.id if isinstance(item, Frame) else item)
                yield item
                if number == self.most:
                    return

    def __len__(self) -> int:
        """The number of files; TypeError for frames, whose number nobody knows."""
        if self.items is None:
            raise TypeError("frames have no length")
        return len(self.items)

    def next_done(self) -> Named:
        """The input whose answer has come."""
        self._done += 1
        return self.under_way.popleft()

    def unanswered(self) -> list[Named]:
        """What has no answer, were the run to end now: of files, also those that were not begun."""
        return list(self.under_way) if self.items is None else list(self.items[self._done :])

    def close(self) -> None:
        """Let go of the source."""
        self.source.close()


def feed_of(options: argparse.Namespace) -> Feed:
    """What --input says, opened. SpecError for what cannot be, or does not go with the other options."""
    try:
        source = open_source(
            options.input,
            size=options.camera_size,
            rate=options.camera_rate,
            pixel_format=options.camera_format,
            queue=options.queue,
        )
    except InputMismatch as error:
        raise SpecError(f"--input: {error}") from error
    feed = Feed(source, options.frames)
    if feed.items is not None and options.frames is not None:
        raise SpecError("--frames is for a video or a camera; these inputs are files")
    if feed.items is None and options.split == CLOUD_FILE:
        source.close()
        raise SpecError(f"--split {CLOUD_FILE} sends input files; frames are none: --split cloud-only sends them")
    if feed.items is None and options.journal:
        source.close()
        raise SpecError("--journal keeps what became of input files; frames are none")
    return feed
