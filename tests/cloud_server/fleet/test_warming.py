"""Tails are run before a model serves: those that its entry names, in the batch sizes that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cloud_server.config import read_config
from cloud_server.fleet import ThisProcess
from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.errors import SpecError
from tests.cloud_server.fleet.served import entry


def load(folder: Path, more: str) -> None:
    file = folder / "server.toml"
    file.write_text(entry("one", more=more))
    config = read_config(file)
    ThisProcess(config).load(config.models)


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ("", [("second", 2)]),
        ('warm_up = {cuts = ["first", "input"]}', [("first", 2), ("input", 2)]),
        (
            'warm_up = {cuts = ["first", "second"], batch_sizes = [7, 1]}',
            [("first", 7), ("second", 7), ("first", 1), ("second", 1)],
        ),
    ],
)
def test_cuts_and_sizes_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str, wanted: object) -> None:
    ran: list[tuple[str, int]] = []
    tail = WrappedModel.tail

    def watched(self: WrappedModel, early: EarlyOutput, /) -> Any:
        output = tail(self, early)
        ran.append((early.layer_name, len(output)))
        return output

    monkeypatch.setattr(WrappedModel, "tail", watched)
    load(tmp_path, more)
    assert ran == wanted


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ('warm_up = {cuts = ["frist"]}', "warm_up: .*frist"),
        ("warm_up = {batch_sizes = [0]}", "expected 1 to"),
        ("warm_up = {sizes = [1]}", "sizes"),
    ],
)
def test_failed_warm_up_is_reported_by_name(tmp_path: Path, more: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        load(tmp_path, more)
