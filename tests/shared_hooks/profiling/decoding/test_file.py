"""Decoding profiles are read as they were written, or refused by the place that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared_hooks.errors import SpecError
from shared_hooks.profiling import decoding
from tests.edge_client.planning.generation.decoder import decoder


def test_a_profile_comes_back(tmp_path: Path) -> None:
    made = decoder("cloud", 1.5)
    decoding.write(made, tmp_path / "p.json")
    assert decoding.read(tmp_path / "p.json") == made


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "isthmus-profile"}, "no decoding profile"),
        ({"version": 2}, "version"),
        ({"side": "middle"}, "side"),
        ({"blocks": []}, "blocks"),
        ({"blocks": [{"name": "x"}]}, r"blocks\[0\]"),
        ({"lengths": [0]}, "lengths"),
        ({"words": -1}, "words"),
    ],
)
def test_invalid_profile_is_refused_with_the_place(change: dict[str, object], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        decoding.from_json({**decoding.to_json(decoder("edge", 1)), **change})


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        decoding.read(tmp_path / "nowhere.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(SpecError, match="is not JSON"):
        decoding.read(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text(json.dumps([]))
    with pytest.raises(SpecError, match="expected an object"):
        decoding.read(tmp_path / "list.json")
