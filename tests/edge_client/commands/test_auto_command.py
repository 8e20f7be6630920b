"""`edge-client run --split auto`: what goes wrong beside the requests costs no request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_client.__main__ import main
from tests.shipped import folder_of


def words(folder: Path) -> list[str]:
    base = ["run", "--server", "127.0.0.1:1", "--split", "auto", "--input", str(folder), "--device", "cpu"]
    return [*base, "--profile-seconds", "0.5", "--patience", "0.5", "--no-progress", "--json", "-"]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = folder_of(tmp_path / "images", 3)
    (folder / "0000_broken.png").write_text("no image")
    return folder


def test_a_first_input_that_cannot_be_read_fails_alone(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(images)) == 1
    known = json.loads(capsys.readouterr().out)
    assert (known["answered"], known["failed"]) == (3, 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_log_of_decisions_that_cannot_be_written_fails_no_request(
    images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (images / "0000_broken.png").unlink()
    assert main([*words(images), "--log-decisions", "/dev/full"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["answered"] == 3 and err.count("cannot be written any more") == 1
