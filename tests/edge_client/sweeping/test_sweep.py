"""The command: real processes, real answers, results that are complete whatever happened on the way."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from edge_client.__main__ import main
from edge_client.model_choice import ModelChoice
from edge_client.process import local_server
from edge_client.sweeping import settings
from tests.ports import free_port
from tests.shipped import IMAGES, folder_of
from tests.starts import Started
from tests.waiting import eventually

ROOT = Path(__file__).parents[3]
CUTS = "stage1.0.conv2,classifier"
WAYS = 3 + 2 + 2  # everything here, there, there as a file; two cuts, networked and local
MANY = 4
"""Inputs of a sweep that is interrupted, each asked so often that it is, in the middle of it."""
REPETITIONS = 10
PATIENCE = 120.0
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with local_server(ModelChoice("digits", threads=1)) as address:
        yield address


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "images", 3)


def words(out: Path, *more: str) -> list[str]:
    return ["sweep", "--output", str(out), "--cuts", CUTS, "--no-predict", "--no-progress", "--threads", "1", *more]


def summary(out: Path) -> Any:
    return json.loads((out / "summary.json").read_text())


def complaint(capsys: Captured) -> str:
    """The last line on standard error."""
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return err.strip().splitlines()[-1]


def test_every_way_is_measured_and_exact(server: str, images: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "out"
    assert main(words(out, "--server", server, "--input", str(images), "--repetitions", "2", "--json", "-")) == 0
    said = json.loads(capsys.readouterr().out)
    known = summary(out)
    assert said == {**known, "exit_status": 0}
    assert [(way["name"], way["mode"]) for way in known["ways"]] == [
        ("edge-only", "local"),
        ("cloud-only", "networked"),
        ("cloud-only-file", "networked"),
        ("stage1.0.conv2", "networked"),
        ("classifier", "networked"),
        ("stage1.0.conv2", "local"),
        ("classifier", "local"),
    ]
    for way in known["ways"]:
        assert (way["requests"], way["failed"], way["exact"], way["agreeing"]) == (9, 0, 9, 9), way["name"]
    requests = pl.read_parquet(out / "requests.parquet")
    assert requests.height == 3 * (2 + 1) * WAYS and requests["sequence"].is_unique().all()
    assert (requests["end_to_end_ns"] == requests["measured_ns"]).all()
    assert (requests["top1"] == requests["truth"]).all()
    local = requests.filter(pl.col("mode") == "local")
    assert (local.select("upload_ns", "in_transit_ns", "download_ns", "server_queue_ns").to_numpy() == 0).all()
    rows = pl.read_csv(out / "rows.csv", infer_schema_length=None)
    layers = rows.filter(pl.col("layer_id").is_not_null())
    per_request = layers.group_by("input", "cut", "mode", "repetition").agg(pl.col("layer_id").n_unique(), pl.len())
    assert per_request.height == 3 * WAYS
    assert per_request["layer_id"].n_unique() == 1 and (per_request["layer_id"] == per_request["len"]).all()
    assert set(rows["side"]) == {"edge", "cloud"} and "outside layers" in set(rows["layer"])
    assert set(layers["dtype"]) == {"float32"} and layers["shape"].null_count() == 0
    asked = requests.filter(pl.col("layers"))
    assert set(asked["repetition"]) == {0} and asked.height == 3 * WAYS
    assert requests.filter(~pl.col("layers"))["edge_forward_ns"].null_count() == 3 * 2 * WAYS
    assert (out / "report.html").read_text().startswith("<!doctype html>")


def test_a_server_is_started_and_stopped_and_the_plan_comes_first(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "out"
    few = ["--input", str(sorted(IMAGES.glob("*.png"))[0]), "--repetitions", "1", "--profile-repetitions", "1"]
    argv = [
        "sweep",
        "--model",
        "digits",
        "--output",
        str(out),
        "--every",
        "20",
        "--threads",
        "1",
        "--no-progress",
        *few,
    ]
    assert main(argv) == 0
    known = summary(out)
    assert known["settings"]["server"] == "started here"
    names = {one["name"] for one in known["prediction"]["candidates"]}
    choices = [way for way in known["ways"] if way["mode"] == "networked" or way["name"] == "edge-only"]
    assert {way["name"] for way in choices} <= names
    assert all(way["predicted"]["latency_ns"] > 0 for way in choices)
    requests = pl.read_csv(out / "requests.csv", infer_schema_length=None)
    assert requests.filter(pl.col("mode") == "networked")["predicted_latency_ns"].null_count() == 0
    assert known["decision"]["predicted"]["winner"] in names
    first = (out / "journal.jsonl").read_text()
    capsys.readouterr()
    assert main(argv) == 0  # nothing is left to do, and no server is needed for that
    assert "measured already" in capsys.readouterr().out
    assert (out / "journal.jsonl").read_text() == first


def test_a_failing_input_is_recorded_and_the_others_go_on(
    server: str, images: Path, tmp_path: Path, capsys: Captured
) -> None:
    (images / "0000_broken.png").write_bytes(b"no image")
    out = tmp_path / "out"
    assert main(words(out, "--server", server, "--input", str(images), "--repetitions", "1")) == 1
    known = summary(out)
    assert len(known["measured_inputs"]) == 4
    for way in known["ways"]:
        assert (way["requests"], way["failed"], way["exact"]) == (8, 2, 6)
    (failure,) = known["failures"]
    assert failure["input"] == "0000_broken.png" and failure["count"] == 2 * WAYS
    assert "cannot be read as an image" in failure["error"] and "0000_broken.png" in capsys.readouterr().out


def test_the_example_is_swept_where_there_are_no_files(server: str, tmp_path: Path) -> None:
    spec = tmp_path / "plain.toml"
    digits = ROOT / "shared_hooks" / "models" / "digits"
    text = (digits / "digits.toml").read_text().replace('"weights.safetensors"', f'"{digits / "weights.safetensors"}"')
    spec.write_text(text)
    out = tmp_path / "out"
    assert main(words(out, "--server", server, "--model", str(spec), "--no-local", "--repetitions", "1")) == 0
    known = summary(out)
    assert known["measured_inputs"] == ["example"]
    assert [way["name"] for way in known["ways"]] == ["edge-only", "cloud-only", "stage1.0.conv2", "classifier"]


def test_the_budget_ends_it_and_the_next_run_continues(server: str, images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = words(out, "--server", server, "--input", str(images), "--repetitions", "2", "--seconds", "0.000001")
    for count in (1, 2, 3):
        assert main(argv) == 0
        known = summary(out)
        assert len(known["measured_inputs"]) == count and known["repetitions"] == [1] * count
        assert "budget" in known["ended"]
        assert "Not complete" in (out / "report.html").read_text()


def test_other_settings_are_refused_by_name(server: str, images: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "out"
    argv = words(out, "--server", server, "--input", str(images), "--repetitions", "1")
    assert main(argv) == 0
    for more, said in (
        (["--repetitions", "2"], "repetitions: 1 then, 2 now"),
        (["--codec", "lz4"], "codec: raw then, lz4 now"),
        (["--cuts", "classifier"], "ways: 7 then, 5 now"),
        (["--server", "127.0.0.1:1"], "server: "),
    ):
        assert main([*argv, *more]) == 2
        line = complaint(capsys)
        assert said in line and "--fresh" in line
    next(images.glob("*.png")).write_bytes(sorted(IMAGES.glob("*.png"))[9].read_bytes())
    assert main(argv) == 2
    assert "inputs: " in complaint(capsys)
    assert main([*argv, "--fresh"]) == 0
    assert len(summary(out)["measured_inputs"]) == 3


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--cuts", "stage1.0.conv9"], "Did you mean.*stage1.0.conv"),
        (["--objective", "beauty"], "objective 'beauty'"),
        (["--input", "/nowhere/x.png"], "--input: no such input"),
        (["--server", "nowhere"], "nowhere"),
        (["--model", "digit"], "digits"),
        (["--json", "/nowhere/x.json"], "--json"),
    ],
)
def test_bad_words_end_it_before_any_work(tmp_path: Path, capsys: Captured, more: list[str], said: str) -> None:
    import re

    assert main([*words(tmp_path / "out"), *more]) == 2
    assert re.search(said, complaint(capsys))
    assert not (tmp_path / "out" / "journal.jsonl").exists() or not (tmp_path / "out" / "journal.jsonl").read_text()


def test_every_zero_and_both_choices_of_cuts_are_no_choice(tmp_path: Path, capsys: Captured) -> None:
    for more in (["--every", "0"], ["--cuts", "a", "--every", "2"], ["--repetitions", "0"]):
        with pytest.raises(SystemExit) as left:
            main(["sweep", "--output", str(tmp_path / "out"), *more])
        assert left.value.code == 2
    assert not (tmp_path / "out").exists()


def test_a_missing_extra_is_one_line(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    assert main(["sweep", "--output", str(tmp_path / "out")]) == 2
    assert complaint(capsys) == 'edge-client: error: polars and jinja2 missing: pip install "isthmus[sweep]"'
    assert not (tmp_path / "out").exists()
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert 'pip install "isthmus[sweep]"' in complaint(capsys)


# -- interruptions ---------------------------------------------------------------------------------------------------


def spawn(argv: list[str]) -> Started:
    return Started("edge_client", argv, cwd=ROOT)


def inputs_in(out: Path) -> list[str]:
    """The finished lines of the journal that are inputs."""
    path = out / "journal.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.startswith('{"index"') and line.endswith("\n")]


def begun(out: Path, process: Started) -> bool:
    """Whether an input is in the journal; a process that ended by then has failed."""
    assert process.poll() is None, "it ended before the first input was done"
    return bool(inputs_in(out))


@pytest.fixture
def many(tmp_path: Path) -> Path:
    folder = tmp_path / "many"
    folder.mkdir()
    for path in sorted(IMAGES.glob("*.png"))[:MANY]:
        shutil.copy(path, folder)
    return folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_sweep_loses_at_most_one_input(
    server: str, many: Path, tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "out"
    argv = words(out, "--server", server, "--input", str(many), "--repetitions", str(REPETITIONS))
    first = spawn(argv)
    try:
        eventually(lambda: begun(out, first), seconds=PATIENCE)
        first.send_signal(number)
        _, err = first.communicate(timeout=PATIENCE)
    finally:
        first.kill()
        first.wait()
    kept = inputs_in(out)
    assert 1 <= len(kept) < MANY
    if number == signal.SIGINT:
        assert first.returncode == 130 and "the same command continues" in err and "Traceback" not in err
        assert len(summary(out)["measured_inputs"]) == len(kept)
        assert "Not complete" in (out / "report.html").read_text()
    second = spawn(argv)
    text, err = second.communicate(timeout=2 * PATIENCE)
    assert second.returncode == 0, err
    assert f"going on after {len(kept)} of {MANY} inputs" in text
    assert inputs_in(out)[: len(kept)] == kept and len(inputs_in(out)) == MANY
    known = summary(out)
    assert len(known["measured_inputs"]) == MANY and known["ended"] is None
    requests = pl.read_parquet(out / "requests.parquet")
    assert requests.height == MANY * (REPETITIONS + 1) * WAYS
    assert requests["sequence"].is_unique().all() and requests["exact"].all()


def test_a_lost_server_leaves_what_there_was_and_says_so(many: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with local_server(ModelChoice("digits", threads=1), listen=f"127.0.0.1:{free_port()}") as address:
        argv = words(
            out, "--server", address, "--input", str(many), "--repetitions", str(REPETITIONS), "--patience", "2"
        )
        process = spawn(argv)
        try:
            eventually(lambda: begun(out, process), seconds=PATIENCE)
        except BaseException:
            process.kill()
            raise
    try:
        text, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 3, err
    assert "ServerUnavailable" in err and "the same command continues" in err and "report.html" in text
    known = summary(out)
    assert 1 <= len(known["measured_inputs"]) < MANY and "ServerUnavailable" in known["ended"]
    with local_server(ModelChoice("digits", threads=1), listen=address):
        assert main([*argv[:-1], "60"]) == 0
    assert len(summary(out)["measured_inputs"]) == MANY
