"""Named cuts of models of pictures and words: the tower here, the language model there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from edge_client.generation.generator import check_cut
from shared_hooks.errors import CutRefused, UnknownLayer
from shared_hooks.generation import DecodingTail, InProcess, SplitForward
from tests.shared_hooks.generation.small import make, prompt


@pytest.mark.parametrize("cut", ["group:vision", "group:fusion"])
def test_the_tower_and_the_projector_stay_here(cut: str) -> None:
    here: Any = make("sees")
    there: Any = make("sees")
    words = prompt()
    words["input_ids"][:, 3:7] = 5
    picture = {**words, "pixel_values": torch.randn(1, 3, 16, 16)}
    whole = here.generate(**picture, max_new_tokens=8, do_sample=False)
    name = check_cut(here, cut)
    assert name == "model.language_model.layers.0"
    # what the server does not need is not there
    there.model.vision_tower.to("meta")
    there.model.multi_modal_projector.to("meta")
    with SplitForward(here, name, InProcess(DecodingTail(there, name))):
        assert torch.equal(here.generate(**picture, max_new_tokens=8, do_sample=False), whole)


def test_a_group_that_is_not_there_or_not_before_the_words() -> None:
    with pytest.raises(UnknownLayer, match='no group "audio"'):
        check_cut(make("sees"), "group:audio")
    with pytest.raises(UnknownLayer, match=r"model\.layers\.0"):
        check_cut(make("llama"), "group:vision")
    with pytest.raises(CutRefused, match="vision, audio, fusion"):
        check_cut(make("sees"), "group:language")
