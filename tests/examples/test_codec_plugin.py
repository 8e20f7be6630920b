"""The codec of examples/codec_plugin: installed as users install it, on a real server, and broken on purpose."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from edge_client import EdgeClient, local_server
from edge_client.model_choice import ModelChoice
from shared_hooks.codecs import CODECS
from shared_hooks.errors import Disagreement, SpecError

EXAMPLE = Path(__file__).parents[2] / "examples" / "codec_plugin"
IMAGE = torch.randn(1, 1, 32, 32, generator=torch.Generator().manual_seed(0))
BROKEN = """
import acme_codecs
class TopK(acme_codecs.TopK):
    def decode(self, *args):
        raise RuntimeError("out of licences")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package in it, and its entry points."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation", "--quiet"]
    subprocess.run([*command, "--target", str(folder), str(EXAMPLE)], check=True, timeout=240)
    return folder


@pytest.fixture(autouse=True)
def here(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.setenv("PYTHONPATH", str(installed))
    monkeypatch.setattr("shared_hooks.codecs.registry._added", {})
    yield
    CODECS.pop("acme:topk", None)


def test_both_sides_have_it() -> None:
    choice = ModelChoice("digits", device="cpu", threads=1)
    with (
        local_server(choice, arguments=["--codec-plugin", "acme:topk"]) as address,
        EdgeClient(address, choice, split="stage2", codec="acme:topk") as client,
    ):
        answer = client.infer(IMAGE)
        assert answer.codecs == ("acme:topk",) and answer.output.shape == (1, 10)
        assert answer.bytes_up < 4 * 32 * 8 * 8 / 4
    with pytest.raises(SpecError, match="must be one of"):
        CODECS.pop("acme:topk")
        EdgeClient(None, choice, split="stage2", codec="acme:other")


def test_a_server_that_was_not_started_with_it_says_so() -> None:
    choice = ModelChoice("digits", device="cpu", threads=1)
    with local_server(choice) as address, pytest.raises(Disagreement, match="has no codec acme:topk"):
        EdgeClient(address, choice, split="stage2", codec="acme:topk").infer(IMAGE)


def test_where_the_server_fails_to_decode_the_request_is_not_lost(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken_codecs.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{installed}:{tmp_path}")
    choice = ModelChoice("digits", device="cpu", threads=1)
    with (
        local_server(choice, arguments=["--codec-plugin", "broken_codecs:TopK"]) as address,
        EdgeClient(address, choice, split="stage2") as plain,
        EdgeClient(address, choice, split="stage2", codec="acme:topk") as client,
        caplog.at_level(logging.WARNING),
    ):
        wanted = plain.infer(IMAGE).output
        answers = [client.infer(IMAGE) for _ in range(2)]
        assert all(one.codecs == ("raw",) and torch.equal(one.output, wanted) for one in answers)
        many = list(client.infer_many([IMAGE] * 5))
        assert all(torch.equal(one.output, wanted) for one in many)
    reported = [one.getMessage() for one in caplog.records if "acme:topk" in one.getMessage()]
    assert len(reported) == 1 and "out of licences" in reported[0] and "is not used any more" in reported[0]
