"""``edge-client hooks``, ``--config``, ``cloud-server --hooks``: listings in order, bad files in one line."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from cloud_server.cli import main as cloud_main
from edge_client.__main__ import main
from shared_hooks.lifecycle import Stage
from shared_hooks.models import load_spec
from tests.cloud_server.real import Process
from tests.shared_hooks.lifecycle.service import service
from tests.shipped import IMAGES

HERE = "tests.shared_hooks.lifecycle.left"
HOOKS = f"""[lifecycle]
hooks = [
    "{HERE}:marked",
    {{ hook = "{HERE}:Watchdog", name = "early", priority = "HIGHEST" }},
    {{ hook = "{HERE}:Watchdog", name = "late" }},
    "{HERE}:breaks",
]
"""
BAD = [
    ("[lifecycle]\nhooks = [3]\n", "hooks"),
    ('[lifecycle]\nhooks = ["no_such_module:Hook"]\n', "no_such_module"),
    (f'[lifecycle]\nhooks = ["{HERE}:Misspelt"]\n', "Did you mean on_error"),
    ('[lifecycle]\nremove = ["lgo"]\n', "Did you mean log"),
    ("[lifecycle\n", "config.toml"),
]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(HOOKS)
    return file


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


def one_line(capsys: pytest.CaptureFixture[str], says: str) -> None:
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and says in captured.err and "Traceback" not in captured.err
    assert not captured.out


class TestHooks:
    def test_by_default(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["hooks"]) == 0
        text = capsys.readouterr().out
        assert rows(text)[0] == ["stage", "hook", "priority", "calls", "failures", "total", "ms", "us", "a", "call"]
        listed = [line.split()[0] for line in text.splitlines() if " log " in line]
        assert listed == [stage.value for stage in Stage if stage.value in listed] and "on_error" in listed
        silent = " ".join(text.rpartition("no process listens at ")[2].split()).split(", ")
        assert sorted([*silent, *listed]) == sorted(stage.value for stage in Stage if stage.edge)

    def test_in_their_order(self, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["hooks", "--config", str(config)]) == 0
        table = rows(capsys.readouterr().out)
        head = next(number for number, row in enumerate(table) if row[0] == "after_head")
        assert table[head][:4] == ["after_head", "early", "0", "0"] and table[head + 1][:3] == ["late", "50", "0"]
        assert ["after_request", "marked", "70", "0", "0", "0.000", "-"] in table

    def test_the_stages(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["hooks", "--stages"]) == 0
        lines = capsys.readouterr().out.splitlines()[2:]
        assert [line.split()[0] for line in lines] == [stage.value for stage in Stage]
        for line, stage in zip(lines, Stage, strict=True):
            assert stage.edge in line and stage.cloud in line and line.endswith(" ".join(stage.facts))

    def test_nothing_is_wider_than_a_narrow_terminal(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        assert main(["hooks"]) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        assert main(["hooks", "--stages"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if line[0] != " "] == [stage.value for stage in Stage]
        assert max(map(len, lines)) <= 80

    def test_with_what_they_cost(self, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
        files = [word for file in sorted(IMAGES.glob("*.png"))[:3] for word in ("--input", str(file))]
        words = ["hooks", "--config", str(config), "--split", "edge-only", "--device", "cpu", *files, "--json", "-"]
        assert main(words) == 0
        captured = capsys.readouterr()
        listed = {(one["hook"], one["stage"]): one for one in json.loads(captured.out)["hooks"]}
        early = listed["early", "after_head"]
        assert (early["calls"], early["failures"], early["priority"]) == (3, 0, 0) and early["cost_ns"] > 0
        broken = listed["breaks", "before_request"]
        assert (broken["calls"], broken["failures"], broken["last_failure"]) == (3, 3, "ValueError: on purpose")

    def test_with_a_server(self, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = str(sorted(IMAGES.glob("*.png"))[0])
        with service(spec=load_spec("digits")) as both:
            words = ["hooks", "--config", str(config), "--server", both.address, "--split", "stage2.0.conv2"]
            assert main([*words, "--input", file, "--device", "cpu"]) == 0
            assert "early" in capsys.readouterr().out
            assert both.cloud.count(Stage.BEFORE_TAIL) == 1

    def test_words_that_cannot_be_used(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = str(sorted(IMAGES.glob("*.png"))[0])
        assert main(["hooks", "--input", file, "--split", "stem.0"]) == 2
        one_line(capsys, "no server")
        assert main(["hooks", "--input", str(tmp_path / "nowhere.png"), "--split", "edge-only"]) == 2
        one_line(capsys, "nowhere.png")
        assert main(["hooks", "--input", file, "--server", "127.0.0.1:1"]) == 2  # else it would go unused
        one_line(capsys, "say where to cut, too: --split LAYER")
        assert main(["hooks", "--split", "stem.0"]) == 2
        one_line(capsys, "--split stem.0: nothing is run without --input")
        assert main(["hooks", "--json", str(tmp_path / "no" / "where.json")]) == 2
        one_line(capsys, "cannot be written")

    @pytest.mark.parametrize(("text", "says"), BAD)
    def test_files_that_cannot_be_used(
        self, tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "config.toml"
        file.write_text(text)
        for words in (
            ["hooks", "--config", str(file)],
            ["run", "--config", str(file), "--split", "edge-only", "--input", str(IMAGES)],
            ["watch", "--config", str(file), "--server", "127.0.0.1:1", "--split", "1", "--input", str(IMAGES)],
        ):
            assert main(words) == 2, words
            one_line(capsys, says)
        assert cloud_main([str(file), "--hooks"]) == 2
        one_line(capsys, says)
        assert main(["hooks", "--config", str(tmp_path / "nowhere.toml")]) == 2
        one_line(capsys, "nowhere.toml")


class TestRun:
    def test_shows_and_writes_them(self, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
        files = [word for file in sorted(IMAGES.glob("*.png"))[:2] for word in ("--input", str(file))]
        words = ["run", "--split", "edge-only", "--device", "cpu", "--no-progress", *files]
        assert main([*words, "--config", str(config)]) == 0
        table = rows(capsys.readouterr().out)
        assert any(row[:4] == ["after_head", "early", "0", "2"] for row in table)
        assert main([*words, "--config", str(config), "--json", "-"]) == 0
        known = json.loads(capsys.readouterr().out)
        listed = {(one["hook"], one["stage"]): one["calls"] for one in known["lifecycle"]}
        assert listed["early", "after_head"] == listed["late", "after_head"] == 2 and known["answered"] == 2
        assert main([*words, "--json", "-"]) == 0
        assert {one["hook"] for one in json.loads(capsys.readouterr().out)["lifecycle"]} == {"log"}
        assert main(words) == 0
        assert "priority" not in capsys.readouterr().out


class TestServer:
    def test_lists_its_own_and_ends(self, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert cloud_main([str(config), "--hooks"]) == 0
        table = rows(capsys.readouterr().out)
        tail = next(number for number, row in enumerate(table) if row[0] == "after_tail")
        assert table[tail][:3] == ["after_tail", "early", "0"] and table[tail + 1][:2] == ["late", "50"]
        assert not any(row[0] == "after_head" for row in table)

    def test_two_processes(self, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Hooks on both sides, one that fails among them: the answers come, the log says so once, and what it cost."""
        process = Process("--model", "digits", str(config))
        try:
            words = ["run", "--server", f"127.0.0.1:{process.port}", "--split", "stage2.0.conv2", "--no-progress"]
            words += ["--input", str(IMAGES), "--device", "cpu", "--config", str(config), "--json", "-"]
            assert main(words) == 0
            known = json.loads(capsys.readouterr().out)
            assert known["answered"] == 40 and known["accuracy"] >= 0.95
            process.signal(signal.SIGTERM)
            assert process.wait() == 0
        finally:
            process.close()
        lines = process.log.splitlines()
        assert sum("hook breaks failed at before_request: ValueError: on purpose" in line for line in lines) == 1
        said = [line.partition("cloud_server: ")[2] for line in lines if "cloud_server: " in line]
        order = [said.index(word) for word in ("SIGTERM", "draining", "drained")]
        assert order == sorted(order) and said[0].startswith("model digits: 49 layers on cpu, weights ")
        assert any(line.startswith("client ") and line.endswith("uses model digits") for line in said)
        assert any(line.startswith("stream of client ") for line in said)
        table = rows(process.log)
        assert any(row[:5] == ["before_request", "breaks", "50", "40", "40"] for row in table)
        assert any(row[:4] == ["after_tail", "early", "0", "40"] for row in table)
