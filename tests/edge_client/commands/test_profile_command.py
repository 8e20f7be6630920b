"""``edge-client profile``: JSON alone on standard output, a table that fits, one line for what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_client.__main__ import main
from edge_client.tasks.profile import as_text
from shared_hooks import WrappedModel
from shared_hooks.errors import ServerUnavailable
from shared_hooks.models import load_spec
from shared_hooks.profiling.profile import Profile, Quartiles, from_json, read, to_json
from shared_hooks.profiling.profiler import ProfileOptions, profile_cloud, profile_edge
from tests.shipped import IMAGES

QUICK = ["profile", "--model", "digits", "--device", "cpu", "--repetitions", "1", "--warmup", "1", "--no-progress"]
ONCE = ProfileOptions(warmup=1, repetitions=1, pause=0.0)
Captured = pytest.CaptureFixture[str]


def made(measure: Callable[..., Profile]) -> Profile:
    spec = load_spec("digits")
    args, kwargs = spec.example() or ((), {})
    with WrappedModel(spec.load_model()) as wrapped:
        return measure(wrapped, "digits", args, kwargs, ONCE)


@pytest.fixture(scope="module")
def edge() -> Profile:
    return made(profile_edge)


@pytest.fixture(scope="module")
def cloud() -> Profile:
    return made(profile_cloud)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, cloud: Profile) -> str:
    monkeypatch.setattr("edge_client.tasks.profile.fetch_profile", lambda *args, **kwargs: to_json(cloud))
    return "127.0.0.1:50051"


def test_json_is_alone_on_standard_output(capsys: Captured) -> None:
    assert main([*QUICK, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    found = from_json(json.loads(out), "edge")
    assert len(found.layers) == 49
    assert found.model.model_id == "digits"
    assert len(err.splitlines()) <= 1  # that there is no energy meter


def test_a_table_and_a_file(capsys: Captured, tmp_path: Path) -> None:
    path = tmp_path / "edge.json"
    assert main([*QUICK, "--json", str(path), "--input", str(IMAGES)]) == 0
    out = capsys.readouterr().out
    found = read(path, "edge")
    for layer in found.layers:
        assert layer.name.partition("#")[0] in out
    assert "calls of one module together" in out and "relu#2 " not in out.partition("slowest")[0]
    table = out.partition("input file")[0]  # where times have no interval: it wants two
    assert "1 whole forward, ms; " in table and "[" not in table
    assert "outside layers" in out
    assert "slowest of 50 cuts" in out
    assert [file.suffix for file in found.files] == [".png"] * 3
    assert found.files[0].name in out


def test_both_sides(capsys: Captured, server: str, tmp_path: Path) -> None:
    path = tmp_path / "both.json"
    assert main([*QUICK, "--server", server, "--json", str(path)]) == 0
    assert read(path, "edge").side == "edge"
    assert read(path, "cloud").side == "cloud"
    out = capsys.readouterr().out
    assert "digits on the edge" in out
    assert "digits on the cloud" in out


def test_the_cloud_alone(capsys: Captured, server: str) -> None:
    assert main([*QUICK, "--server", server, "--side", "cloud", "--json", "-"]) == 0
    assert from_json(json.loads(capsys.readouterr().out)).side == "cloud"


def test_without_a_server_the_edges_profile_is_not_lost(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fetch(*args: Any, **kwargs: Any) -> object:
        raise ServerUnavailable("no server at 127.0.0.1:1 for 15 s")

    monkeypatch.setattr("edge_client.tasks.profile.fetch_profile", fetch)
    path = tmp_path / "edge.json"
    assert main([*QUICK, "--server", "127.0.0.1:1", "--json", str(path)]) == 3
    assert read(path).side == "edge"
    assert "no server at 127.0.0.1:1" in capsys.readouterr().err


def test_a_server_with_other_weights_is_named(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, cloud: Profile
) -> None:
    other = to_json(cloud)
    other["model"]["weights_hash"] = "dd" * 16
    monkeypatch.setattr("edge_client.tasks.profile.fetch_profile", lambda *args, **kwargs: other)
    assert main([*QUICK, "--server", "127.0.0.1:50051"]) == 3
    assert "another weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "digit"], "Did you mean digits"),
        (["--json", "/proc/none/profile.json"], "cannot be written"),
        (["--side", "cloud"], "give --server"),
        (["--server", "nowhere"], "expected HOST:PORT"),
        (["--input", "missing.png"], "no such input"),
    ],
)
def test_wrong_use_is_one_line(capsys: Captured, arguments: list[str], says: str) -> None:
    assert main([*QUICK, *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert len(err.splitlines()) == 1
    assert says in err


@pytest.mark.parametrize("arguments", [["--repetitions", "0"], ["--seconds", "-1"], ["--side", "fog"]])
def test_the_parser_refuses(capsys: Captured, arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        main([*QUICK, *arguments])
    assert arguments[0] in capsys.readouterr().err


def test_calls_of_one_module_are_one_row(edge: Profile) -> None:
    """Their times added; an interval where there are two forwards or more, of one call alone."""
    relu = [one for one in edge.layers if one.name.partition("#")[0] == "stage1.0.relu"]
    assert len(relu) > 1
    layers = tuple(
        replace(one, inference_ns=Quartiles(2e6, 1e6, 4e6, 9)) if one in relu else one for one in edge.layers
    )
    text = as_text(replace(edge, layers=layers, whole_ns=Quartiles(9e6, 8e6, 10e6, 9)))
    (row,) = (line for line in text.splitlines() if " stage1.0.relu " in line)
    assert row.split()[:5] == [str(relu[0].layer_id), "stage1.0.relu", "ReLU", str(len(relu)), f"{2 * len(relu)}.000"]
    assert "9.000 [8.000, 10.000]" in text and "9 whole forwards; median [" in text


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_the_table_fits_where_it_can(edge: Profile, cloud: Profile, width: int) -> None:
    for profile in (edge, cloud):
        lines = as_text(profile, width).splitlines()[3:]
        assert "outside layers" in "\n".join(lines)
        if width >= 80 and profile.side == "edge":
            assert max(map(len, lines)) <= width
