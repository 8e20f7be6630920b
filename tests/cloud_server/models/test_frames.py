"""What a server keeps of clients' frames stays within its bound, and one client's do not push out everybody's."""

from __future__ import annotations

import torch

from cloud_server.models.served_model import SHARE, KeptFrames
from shared_hooks.sharing import Owner

MOST = 1 << 20
FRAME = torch.zeros((1, 256), dtype=torch.int16)
LARGE = torch.zeros((1, MOST // 40), dtype=torch.int16)
"""With what it takes beside: a twentieth of all there is, and some."""


def test_large_frames_take_a_share_of_the_bound_and_others_keep_theirs() -> None:
    kept = KeptFrames(MOST)
    honest = kept.of(Owner("a", "honest"), "cut")(0)
    honest.put(1, FRAME, 0)
    own = kept.nbytes
    stranger = kept.of(Owner("b", "stranger"), "cut")(0)
    for number in range(1, 40):
        stranger.put(number, LARGE, 0)
        assert kept.nbytes <= MOST // SHARE + own
    assert stranger.get(39) is not None and stranger.get(37) is None
    stranger.put(40, torch.zeros((1, MOST), dtype=torch.int16), 0)
    assert stranger.get(40) is None and kept.nbytes == own
    for piece in range(40):  # of ever more tensors: its own oldest go
        kept.of(Owner("b", "stranger"), "cut")(piece).put(1, LARGE, 0)
        assert kept.nbytes <= MOST
    assert honest.get(1) is not None


def test_frames_of_next_to_nothing_count_for_the_memory_they_take() -> None:
    kept = KeptFrames(MOST)
    for piece in range(2000):
        kept.of(Owner("b", "stranger"), "cut")(piece).put(1, FRAME[:, :1], 0)
    assert sum(kept.of(Owner("b", "stranger"), "cut")(piece).get(1) is not None for piece in range(2000)) < 1100
