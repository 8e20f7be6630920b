"""Attacks written by hand, one family a file: each yields `Attack`s made of honest recordings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from studies.attacks.corpus import Recording
from studies.attacks.shots import Frames, Shot, padded


@dataclass(frozen=True)
class Attack:
    """One request or raw frames, on one model."""

    name: str
    model_id: str
    shot: Shot | None = None
    frames: Frames | None = None

    def made(self, id: int) -> Frames:
        """What is sent."""
        assert self.shot is not None or self.frames is not None
        return self.shot.frames(id) if self.shot is not None else list(self.frames or [])


Family = Callable[[list[Recording]], Iterator[Attack]]


def changed(recording: Recording, name: str, change: Callable[[dict[str, Any]], Any], *, fit: bool = False) -> Attack:
    """The recording with its description changed; ``fit``: with the payload that the new one asks for."""
    shot = Shot.of(recording)
    shot.reported = json.loads(json.dumps(recording.reported))
    change(shot.reported)
    if fit:
        refit(shot)
    cut = recording.reported["cut"]
    return Attack(f"{name} at {cut[1]}", recording.model_id, shot)


def refit(shot: Shot, byte: bytes = b"\x07") -> None:
    """Give a shot the payload that its slots ask for, all of one byte."""
    sizes = {"float32": 4, "int64": 8, "bool": 1, "uint8": 1, "float64": 8, "int32": 4, "float16": 2, "bfloat16": 2}
    sections = []
    for dtype, _, _, pieces in shot.reported["slots"]:
        for shape, _, _ in pieces:
            count = 1
            for size in shape:
                count *= size
            sections.append((dtype, shape, byte * (count * sizes.get(dtype, 1))))
    states = [
        entry for entry in shot.body["sections"][-len(shot.reported["generators"]) :] if shot.reported["generators"]
    ]
    shot.carry(*padded(sections + [("uint8", entry[2], bytes(entry[4])) for entry in states]))
