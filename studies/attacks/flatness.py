"""Whether a process's memory stays as it is while frames come in."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean

WARM_UP = 0.34
"""Share of the frames after which all that is kept on purpose (descriptions, recipes, imports) is full."""
MOST = 16.0
"""MiB in a hundred thousand frames that still count as flat: pages that the allocator keeps move by some."""
ENOUGH = 100_000
"""Frames."""


@dataclass(frozen=True)
class Flatness:
    """MiB resident at the first look after the warm-up, at the last, and at most; ``slope``: MiB in 100,000 frames, of
    the line through all looks after the warm-up.
    """

    begin: float
    warm: float
    last: float
    most: float
    slope: float
    frames: int

    @property
    def flat(self) -> bool | None:
        """None where there were too few frames to tell growth from what fills up once."""
        return None if self.frames < ENOUGH else self.slope <= MOST

    @classmethod
    def of(cls, looks: list[list[float]]) -> Flatness:
        """``looks``: frames sent, and MiB resident then; at least one."""
        after = [look for look in looks if look[0] >= WARM_UP * looks[-1][0]]
        frames, sizes = [look[0] for look in after], [look[1] for look in after]
        x, y = mean(frames), mean(sizes)
        spread = sum((one - x) ** 2 for one in frames)
        slope = sum((a - x) * (b - y) for a, b in after) / spread if spread else 0.0
        last = round(mean(sizes[-3:]), 1)
        return cls(looks[0][1], sizes[0], last, max(sizes), round(slope * 1e5, 1), int(looks[-1][0]))

    def reported(self) -> dict[str, float | bool | None]:
        """As JSON."""
        return {**vars(self), "flat": self.flat}

    def __str__(self) -> str:
        verdict = {None: "too few frames to tell", True: "flat", False: "GROWS"}[self.flat]
        return (
            f"{self.begin:.0f}, {self.warm:.0f} warm, {self.last:.0f} at last, {self.most:.0f} at most; "
            f"{self.slope:+.1f} in 10^5: {verdict}"
        )
