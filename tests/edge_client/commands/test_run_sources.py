"""``run --input``: a video, a camera, and what is neither; frames a second; memory that does not grow."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from edge_client.__main__ import main
from edge_client.commands import report as reporting
from edge_client.commands.report import InputOutcome
from shared_hooks.models import FrameId, load_spec
from tests.edge_client import fake_server as fake
from tests.edge_client.commands.test_commands import Captured, complaint
from tests.edge_client.fake_server import FakeServer
from tests.edge_client.sources.streams import cut_in_half, make_video, streaming
from tests.starts import Started

ROOT = Path(__file__).parents[3]
HERE = ["run", "--split", "edge-only", "--threads", "1", "--no-progress"]


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    return make_video(tmp_path / "clip.mp4", frames=12)


def test_a_video_through_a_cut_is_answered_frame_by_frame(clip: Path, tmp_path: Path, capsys: Captured) -> None:
    there = tmp_path / "there.json"
    with FakeServer(fake.tails(load_spec("digits").load_model("cpu"))) as server:
        split = ["run", "--server", server.address, "--split", "stage2.0.conv1", "--threads", "1", "--no-progress"]
        assert main([*split, "--input", str(clip), "--json", str(there)]) == 0
    out = capsys.readouterr().out
    assert f"{clip}: 12 taken, 0 dropped, 12 answered, " in out and "clip.mp4#11" in out and "frames/s" in out
    assert main([*HERE, "--input", str(clip), "--json", "-"]) == 0
    here = json.loads(capsys.readouterr().out)
    known = json.loads(there.read_text())
    same = [(one["file"], one["seconds"], one["predictions"]) for one in known["inputs"]]
    assert same == [(one["file"], one["seconds"], one["predictions"]) for one in here["inputs"]] and len(same) == 12
    source = known["source"]
    assert (source["taken"], source["dropped"], source["answered"], source["live"]) == (12, 0, 12, False)
    assert source["frames_per_second"] > 0 and known["inputs_left_out"] == 0


def test_frames_end_a_run(clip: Path, capsys: Captured) -> None:
    assert main([*HERE, "--input", str(clip), "--frames", "5"]) == 0
    assert "5 of 5 inputs answered" in capsys.readouterr().out


@pytest.mark.parametrize("most", [None, 12])
def test_a_truncated_video_among_others_is_one_line(most: int | None, tmp_path: Path, capsys: Captured) -> None:
    cut_in_half(make_video(tmp_path / "a.mkv", 20, "mjpeg"))
    make_video(tmp_path / "b.mkv", 8)
    words = [] if most is None else ["--frames", str(most)]
    assert main([*HERE, "--input", str(tmp_path), *words, "--json", "-"]) == 1
    out, err = capsys.readouterr()
    names = [Path(one["file"]).name for one in json.loads(out)["inputs"]]
    of_a = sum(name.startswith("a.mkv") for name in names)
    answered = 8 if most is None else most - of_a
    assert 0 < of_a < 12 and names[of_a:] == [f"b.mkv#{index}" for index in range(answered)]
    (reported,) = [line for line in err.splitlines() if line.startswith("edge-client: error:")]
    assert "a.mkv ends after" in reported and "truncated" in reported


def test_a_camera_that_dies_is_one_line_after_all_answers(capsys: Captured) -> None:
    with streaming(frames=60, rtsp=True) as address:
        assert main([*HERE, "--input", address, "--json", "-"]) == 1
    out, err = capsys.readouterr()
    known = json.loads(out)
    (reported,) = [line for line in err.splitlines() if line.startswith("edge-client: error:")]
    assert "--input: rtsp://user:***@127.0.0.1" in reported and "the stream ended after" in reported
    assert known["source"]["taken"] == known["answered"] > 0 and "secret" not in out + err


def test_auto_takes_frames(clip: Path, capsys: Captured) -> None:
    words = ["run", "--server", "127.0.0.1:1", "--split", "auto", "--profile-seconds", "0.2", "--threads", "1"]
    assert main([*words, "--patience", "0.2", "--input", str(clip), "--no-progress", "--json", "-"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert known["answered"] == 12
    assert not {one["candidate"] for one in known["decisions"] if "candidate" in one} & {"cloud-only-file"}


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["--input", "/dev/video99"], "no such camera"),
        (["--input", "none.mp4"], "no such input: none.mp4"),
        (["--input", "ftp://cam/x"], "ftp:// is not taken"),
        (["--input", "tcp://127.0.0.1:1"], "Connection refused"),
        (["--input", "tcp://127.0.0.1:1", "--input", "CLIP"], "only input"),
        (["--input", "CLIP", "--queue", "2"], "for a camera"),
        (["--input", "CLIP", "--camera-size", "640x480"], "for a camera"),
        (["--input", "CLIP", "--journal", "j"], "--journal"),
        (["--input", str(ROOT / "docs" / "report.png"), "--frames", "2"], "--frames"),
        (["--input", "CLIP", "--split", "cloud-only-file", "--server", "127.0.0.1:1"], "--split cloud-only sends them"),
        (["--input", "BROKEN"], "it cannot be read as a video"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], reported: str, clip: Path, capsys: Captured) -> None:
    (clip.parent / "broken.mp4").write_text("this is text")
    places = {"CLIP": str(clip), "BROKEN": str(clip.parent / "broken.mp4")}
    assert main([*HERE, *(places.get(word, word) for word in words)]) == 2
    assert reported in complaint(capsys)


@pytest.mark.parametrize("word", ["CLIP", "rtsp://me:secret@127.0.0.1:1/"])
def test_other_commands_say_that_they_take_files(word: str, clip: Path, capsys: Captured) -> None:
    assert main(["layers", "--input", word.replace("CLIP", str(clip))]) == 2
    reported = complaint(capsys)
    assert "videos and cameras are inputs of run" in reported and "secret" not in reported


def test_ctrl_c_tells_what_was_answered(tmp_path: Path) -> None:
    with streaming(frames=2000, seconds=0.01) as address:
        process = Started("edge_client", [*HERE, "--input", address, "--json", str(tmp_path / "j.json")], cwd=ROOT)
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "then interrupted" in out and "frames/s" in out
    assert err == "edge-client: interrupted\n"
    known = json.loads((tmp_path / "j.json").read_text())
    assert known["interrupted"] and known["source"]["answered"] == known["answered"] >= 3


def test_a_report_of_frames_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "KEPT", 4)
    tally: Any = type("Tally", (), {"summary": lambda self: "cam", "as_dict": lambda self: {}})()
    report = reporting.RunReport("m", None, "edge-only", "raw", "cpu", tally=tally)
    for index in range(10):
        report.add(InputOutcome(FrameId("cam", index), error=ValueError("no")))
    report.finish()
    known = report.as_dict()
    assert [one["file"] for one in known["inputs"]] == [f"cam#{index}" for index in range(6, 10)]
    assert (known["failed"], known["inputs_left_out"]) == (10, 6) and "0 of 10 inputs answered" in report.as_text(False)
