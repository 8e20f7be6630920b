"""Targets: names, globs, regular expressions, types, groups; what matches nothing is an error that lists near names."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

from shared_hooks.errors import InputMismatch, UnknownLayer
from shared_hooks.modules import tables
from shared_hooks.observers import ActivationStats
from shared_hooks.observers.base import leaves, resolve
from tests.shared_hooks.observers.small import Residual
from tests.zoo.case import CASES


def names(targets: Any) -> list[str]:
    return list(resolve(Residual(), targets).values())


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("stem", ["stem"]),
        ("(model)", ["(model)"]),
        ("", ["(model)"]),
        ("body.*", ["body.0", "body.1", "body.2"]),
        ("body.[01]", ["body.0", "body.1"]),
        ("re:^body", ["body", "body.0", "body.1", "body.2"]),
        (re.compile(r"\.1$"), ["body.1"]),
        (nn.Conv2d, ["stem", "body.0", "body.2"]),
        ("type:Conv2d", ["stem", "body.0", "body.2"]),
        ("group:head", ["classifier"]),
        (["stem", nn.ReLU], ["stem", "body.1"]),
        (["stem", "s*"], ["stem"]),
    ],
)
def test_matching_targets(targets: Any, expected: list[str]) -> None:
    assert names(targets) == expected


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        ("stam", "no module is called 'stam'. Did you mean stem?"),
        ("bodi.*", "Did you mean body"),
        ("zzz", "There are (model), stem, body"),
        ("re:clasifier$", "Did you mean classifier?"),
        ("re:(", "is not a regular expression"),
        (re.compile("^nothing"), "'^nothing'"),
        (nn.LSTM, "no module is a LSTM. There are Conv2d"),
        ("type:Conv2", "Did you mean Conv2d?"),
        ("group:vison", "Did you mean vision, fusion?"),
        (nn.ReLU(), "is not part of the model"),
        (["stem", "stam"], "stam"),
        ([3], "not int"),
        (3, "not int"),
        (b"stem", "not bytes"),
        ([], "no target was given"),
    ],
)
def test_unmatched_target_lists_similar_names(targets: Any, says: str) -> None:
    with pytest.raises(UnknownLayer, match=re.escape(says)):
        ActivationStats(targets).attach(Residual())


def test_unless_asked_the_leaves_are_looked_at_and_attention_as_a_whole() -> None:
    assert list(leaves(Residual()).values()) == ["stem", "body.0", "body.1", "body.2", "classifier"]
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    assert "self_attn" in leaves(layer).values() and "self_attn.out_proj" not in leaves(layer).values()


@pytest.mark.parametrize("wrong", [{"every_n": 0}, {"every_n": True}, {"max_records": 1.5}, {"bins": -1}])
def test_settings_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputMismatch, match=next(iter(wrong))):
        ActivationStats(**wrong)


def test_only_models_can_be_observed() -> None:
    with pytest.raises(InputMismatch, match="not int"):
        ActivationStats().attach(3)  # type: ignore[arg-type]


def test_groups_of_a_multimodal_model() -> None:
    clip = next(case for case in CASES if case.name == "hf_clip").build()
    found = tables.groups_of(clip)
    assert "vision_model.embeddings.patch_embedding" in found["vision"]
    assert "text_model.embeddings" in found["language"]
    assert set(found["head"]) == {"visual_projection", "text_projection"}
    whisper = next(case for case in CASES if case.name == "hf_whisper").build()
    tables.add_group("audio encoder", "^encoder$", "whisperencoder")
    try:
        assert "encoder.conv1" in tables.groups_of(whisper)["audio encoder"]
        assert "encoder.conv1" in resolve(whisper, "group:audio encoder").values()
    finally:
        del tables.GROUPS["audio encoder"]
