"""How much slower one side is than its profile, from what its parts of the model take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from edge_client.planning.tracker import Tracker

UNTOLD_SHARE: Final = 0.05
"""What a part may take longer than its layers do, as a share of what the rest of the model takes: a thread that wakes,
cold caches, a processor that had gone to sleep."""


class Side:
    """The edge or the server: ``factor`` times as slow as its profile says.

    A part that was profiled at ``p`` and took ``m`` took that for its layers, ``factor * p``, and for what does not
    belong to them. The latter is at least nothing, so ``factor`` is at most ``m / p``; and it is small before the whole
    model, so ``factor`` is no less than ``m / (p + small)``. What lies between says nothing new: a part of 0.1 ms that
    takes 0.5 ms is no word on a model of 50 ms. Nor is one that takes 0.05 ms: it may have been profiled with as much
    that does not belong to it, so by itself it makes no side quicker than its profile.
    """

    def __init__(self, whole_ns: float, parts_ns: Mapping[str, float]) -> None:
        self.take(whole_ns, parts_ns)
        self._factor = Tracker(1.0)

    def take(self, whole_ns: float, parts_ns: Mapping[str, float]) -> None:
        """``parts_ns``: as profiled, by the candidates' keys; what was learned of the factor stays."""
        self._whole, self._parts = whole_ns, parts_ns

    @property
    def factor(self) -> float:
        """As believed now."""
        return self._factor.value

    def expected_ns(self, key: str) -> float:
        """Of this candidate's part now; 0 for a part that was not profiled."""
        return self._parts.get(key, 0.0) * self.factor

    def doubt(self) -> None:
        """Nothing was observed for long: as profiled, until the next observation, which is believed at once."""
        self._factor.reset(1.0, stale=True)

    def observe(self, key: str, ns: float) -> bool:
        """The candidate's part took so long; True for a sudden change of the factor, or an end of doubt."""
        profiled = self._parts.get(key, 0.0)
        if profiled <= 0:
            return False
        small = UNTOLD_SHARE * max(0.0, self._whole - profiled)
        least, most = ns / (profiled + small), max(ns / profiled, min(1.0, (ns + small) / profiled))
        if least < self.factor < most:
            return False
        doubted = self._factor.stale
        return self._factor.observe(min(max(self.factor, least), most)) or doubted
