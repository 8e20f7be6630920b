"""`edge-client plan`: from the model's name to a decision, in one table or one JSON text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edge_client.__main__ import main
from edge_client.planning.objective import STAGES

QUICK = [
    "--model",
    "digits",
    "--device",
    "cpu",
    "--threads",
    "1",
    "--repetitions",
    "1",
    "--seconds",
    "1",
    "--no-progress",
]
IMAGE = str(Path("shared_hooks/models/digits/images/0011_label1.png").resolve())


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments that name profiles of both sides: the edge's measured, the cloud's made of it, a hundred times as fast:
    how long it took here decides nothing.
    """
    folder = tmp_path_factory.mktemp("profiles")
    edge = folder / "edge.json"
    assert main(["profile", *QUICK, "--json", str(edge)]) == 0
    data = json.loads(edge.read_text())
    data["side"] = "cloud"
    for cut in data["cuts"]:
        head = {name: value if name == "n" else value // 100 for name, value in cut["stages"].pop("head").items()}
        cut["stages"] |= {"compute": head, "decode": head, "inject": head}
    cloud = folder / "cloud.json"
    cloud.write_text(json.dumps(data))
    return ["--edge-profile", str(edge), "--cloud-profile", str(cloud)]


LINK = ["--uplink", "5mbit", "--rtt", "20ms"]


def test_without_a_server_json_alone_is_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *QUICK, "--json", "-"]) == 0
    captured = capsys.readouterr()
    plan = json.loads(captured.out)
    names = [one["name"] for one in plan["candidates"]]
    assert names[:2] == ["edge-only", "cloud-only"]
    assert len(names) == len(set(names)) > 40
    assert plan["decision"]["winner"] in names
    for one in plan["candidates"]:
        assert one["latency_ns"] == pytest.approx(sum(one["stages_ns"].values()))
        assert set(one["stages_ns"]) <= set(STAGES)
        assert one["allowed"] and one["reason"] == ""
    assert plan["server_is_ours"]
    assert plan["edge_machine"]["id"] and plan["cloud_machine"]["id"]
    assert captured.err.count("starting a server on this machine") == 1


def test_profiles_and_a_reported_link_need_no_server(profiles: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    link = ["--uplink", "1gbit", "--rtt", "20ms"]  # a shorter round trip, or a slower edge, makes the other one win
    assert main(["plan", *QUICK, *profiles, *link, "--explain", "--top", "5"]) == 0
    captured = capsys.readouterr()
    assert "loopback" not in captured.err
    assert "is best in latency (*)" in captured.out
    assert "link, given: 1gbit up, 1gbit down, 20ms round trip" in captured.out
    assert "to win, one of these alone" in captured.out
    table = captured.out.split("\n\n")[0].splitlines()
    assert len(table) == 7
    assert all(len(line) <= 80 for line in table)


def test_an_input_file_is_prepared_and_counted(profiles: list[str], tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    assert main(["plan", *QUICK, *profiles, *LINK, "--input", IMAGE, "--json", str(target)]) == 0
    found = {one["name"]: one for one in json.loads(target.read_text())["candidates"]}
    assert found["edge-only"]["stages_ns"]["prepare"] > 0
    assert "cloud-only-file" not in found  # no server to ask whether it reads files


def test_constraints_reject_by_name(profiles: list[str], tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    limit = ["--max-bytes-per-second", "50kB", "--rate", "10"]
    assert main(["plan", *QUICK, *profiles, *LINK, *limit, "--json", str(target)]) == 0
    plan = json.loads(target.read_text())
    rejected = {one["name"]: one["reason"] for one in plan["candidates"] if not one["allowed"]}
    assert rejected == plan["decision"]["rejected"]
    assert all("bytes per second" in reason for reason in rejected.values()) and rejected


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--objective", "speed"], "objective 'speed'"),
        (["--uplink", "5mbit"], "needs --uplink and --rtt"),
        (["--power-active", "5"], "go together"),
        (["--partitioner", "magic"], "no such partitioner"),
        (["--max-bytes-per-second", "5kB"], "go together"),
        (["--edge-profile", "/nowhere.json"], "/nowhere.json"),
        ([*LINK, "--objective", "energy", "--max-edge-memory", "1B"], "no candidate satisfies"),
    ],
)
def test_wrong_use_is_one_line(
    arguments: list[str], says: str, profiles: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    own = [] if "--edge-profile" in arguments else profiles
    assert main(["plan", *QUICK, *own, *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert says in error[-1]


def test_a_profile_of_other_weights_is_refused(
    profiles: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(Path(profiles[1]).read_text())
    data["model"]["weights_hash"] = "0" * 64
    other = tmp_path / "other.json"
    other.write_text(json.dumps(data))
    assert main(["plan", *QUICK, "--edge-profile", str(other), *profiles[2:], *LINK]) == 2
    assert "weights" in capsys.readouterr().err


def test_a_profile_of_another_machine_is_marked(
    profiles: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(Path(profiles[1]).read_text())
    data["machine"]["id"] = "elsewhere"
    other, target = tmp_path / "other.json", tmp_path / "plan.json"
    other.write_text(json.dumps(data))
    arguments = ["--edge-profile", str(other), *profiles[2:], *LINK, "--json", str(target)]
    assert main(["plan", *QUICK, *arguments]) == 0
    (warning,) = json.loads(target.read_text())["warnings"]
    assert "machine" in warning
    assert warning in capsys.readouterr().err


def test_partitioners_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--list-partitioners"]) == 0
    assert "regression: " in capsys.readouterr().out


def test_a_model_without_an_example_is_planned_on_the_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.toml").write_text(
        'id = "m"\nfactory = "torch.nn:Linear"\nfactory_kwargs = {in_features = 4, out_features = 2}\n'
    )
    np.save(tmp_path / "x.npy", np.zeros((1, 4), np.float32))
    words = ["plan", "--model", str(tmp_path / "m.toml"), "--device", "cpu", "--edge-profile", "/nowhere.json"]
    assert main([*words, "--input", str(tmp_path / "x.npy")]) == 2
    assert "/nowhere.json" in capsys.readouterr().err
    assert main(words) == 2
    assert "give one with --input" in capsys.readouterr().err
