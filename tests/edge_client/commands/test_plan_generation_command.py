"""`edge-client plan --generate`: a language model's cuts, by what a token takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_client.__main__ import main
from tests.edge_client.generation.speaking import SPEC

MODEL = ["plan", "--model", SPEC, "--device", "cpu", "--threads", "1", "--no-progress"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The JSON of a plan with a server of its own."""
    target = tmp_path_factory.mktemp("plan") / "plan.json"
    assert main([*MODEL, "--generate", "--seconds", "0.1", "--prompt-tokens", "40", "--json", str(target)]) == 0
    return target


def test_every_block_and_the_whole_model_here_are_predicted(measured: Path) -> None:
    plan = json.loads(measured.read_text())
    assert [one["name"] for one in plan["candidates"]] == ["edge-only", *(f"model.layers.{at}" for at in range(6))]
    for one in plan["candidates"][1:]:
        assert one["token_ns"] == pytest.approx(one["edge_ns"] + one["network_ns"] + one["server_ns"])
        assert 128 * 4 < one["bytes_up"] < 128 * 4 + 1000
        assert 384 * 4 < one["bytes_down"] < 384 * 4 + 1000
    assert plan["decision"]["best_cut"].startswith("model.layers.")


def test_another_link_and_drafts_are_asked_of_what_was_measured(
    measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = ["--measured", str(measured), "--uplink", "5mbit", "--rtt", "100ms"]
    assert main([*MODEL, "--generate", "reply", *link, "--draft", "4", "--acceptance", "0.5", "--explain"]) == 0
    said = capsys.readouterr()
    assert "starting a server" not in said.err
    assert "edge-only is best in latency of a reply (*)" in said.out
    assert "4 drafted a round trip, 50% accepted: 1.94 tokens a round trip" in said.out
    assert "to win, one of these alone" in said.out or "would not win by a change of one alone" in said.out


def test_drafting_divides_a_long_round_trip(measured: Path, tmp_path: Path) -> None:
    def token_ns(*more: str) -> float:
        target = tmp_path / "plan.json"
        link = ["--measured", str(measured), "--uplink", "50mbit", "--rtt", "1s"]
        assert main([*MODEL, "--generate", *link, *more, "--json", str(target)]) == 0
        return float(json.loads(target.read_text())["candidates"][1]["token_ns"])

    assert token_ns("--draft", "3", "--acceptance", "1") < token_ns() / 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--draft", "4"], "--draft and --acceptance"),
        (["--draft", "4", "--acceptance", "2"], "acceptance 2"),
        (["--max-edge-memory", "1B"], "no candidate satisfies"),
        (["--uplink", "5mbit"], "--rtt"),
        (["--edge-profile", "e.json"], "--edge-profile is not for --generate"),
        (["--correct"], "--correct is not for --generate"),
        (["--objective", "energy"], "objective energy"),
    ],
)
def test_wrong_use_is_one_line(
    arguments: list[str], says: str, measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*MODEL, "--generate", "--measured", str(measured), *arguments]) == 2
    assert says in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_model_that_writes_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "digits", "--device", "cpu", "--no-progress", "--generate"]) == 2
    assert "has no generate()" in capsys.readouterr().err


def test_a_page_shows_every_cut(measured: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main([*MODEL, "--generate", "--measured", str(measured), "--report", str(page)]) == 0
    text = page.read_text()
    assert all(f"model.layers.{at}" in text for at in range(6))
    assert '"round trip 100 ms"' in text and '"2048 tokens"' in text
