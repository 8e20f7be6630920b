"""What the commands do, from Python: people hand over what they have, and get rows, data frames, text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn

import edge_client
from edge_client import ModelChoice
from edge_client.process import local_server
from edge_client.screen import Tabular
from edge_client.tasks.plan import Planned
from shared_hooks.errors import CutRefused, InputMismatch, ServerUnavailable, SpecError, UnknownLayer, UnknownModel
from shared_hooks.models import load_spec
from shared_hooks.profiling.profile import to_json
from tests.shared_hooks.shown import check

IMAGE = Path("shared_hooks/models/digits/images/0011_label1.png").resolve()
QUICK: Any = {"repetitions": 1, "seconds": 0.3, "progress": False}
CUT = "stage2.0.conv2"


def net() -> nn.Module:
    torch.manual_seed(1)
    parts = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    return nn.Sequential(*parts).eval()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with local_server(ModelChoice("digits", threads=1)) as address:
        yield address


@pytest.fixture(scope="module")
def digits() -> nn.Module:
    return load_spec("digits").load_model()


@pytest.fixture(scope="module")
def planned(server: str) -> Planned:
    return edge_client.plan(server, ModelChoice("digits", device="cpu", threads=1), IMAGE, **QUICK)


def same_frames(found: Tabular) -> None:
    """polars and pandas have the same columns, rows and gaps, and neither needs pyarrow."""
    rows, polars, pandas = found.rows(), found.to_polars(), found.to_pandas()
    assert list(polars.columns) == list(pandas.columns) == list(rows[0])
    assert polars.height == len(pandas) == len(rows) > 0
    for name in polars.columns:
        assert polars[name].null_count() == int(pandas[name].isna().sum()), name
    assert len(repr(found)) < 500 and str(found)
    check(found)
    html = found._repr_html_()
    assert html.count("<tr>") <= 31 and html.count("<th ") == len(found.shown)
    json.dumps(found.as_dict() if hasattr(found, "as_dict") else rows, allow_nan=False)


# -- one function after the other -----------------------------------------------------------------------------------


def test_a_plan_names_the_best_cut_and_says_why(planned: Planned) -> None:
    names = [row["name"] for row in planned.rows()]
    assert names[:3] == ["edge-only", "cloud-only-file", "cloud-only"] and planned.best in names
    assert [row["name"] for row in planned.rows() if row["best"]] == [planned.best]
    assert planned.explain().startswith(f"{planned.best} wins in latency")
    assert "round trip" in planned.text(5) and "5 of 52 candidates, the best first" in planned.text(5)
    assert planned.best_cut in names and planned.as_dict()["decision"]["best_cut"] == planned.best_cut
    assert planned.correction is not None and planned.correction.samples
    assert all(len(line) <= 100 for line in planned.text().splitlines())
    same_frames(planned)


def test_long_notes_of_a_plan_are_wrapped(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(planned), "_below", lambda *_: ["a word " * 40, "short"])
    *_, last = lines = planned.text().splitlines()
    assert all(len(line) <= 100 for line in lines) and last == "short"


def test_a_plan_from_files_measures_nothing(planned: Planned, tmp_path: Path) -> None:
    files = {}
    for side, profile in (("edge", planned.edge), ("cloud", planned.cloud)):
        files[f"{side}_profile"] = tmp_path / f"{side}.json"
        files[f"{side}_profile"].write_text(json.dumps(to_json(profile)))
    reported: Any = {**files, "uplink": "1mbit", "rtt": "30ms", "progress": False}
    found = edge_client.plan("none", "digits", objective="bytes", power=(6.0, 2.0), **reported)
    assert found.best == "edge-only" and not found.server_is_ours
    assert str(found.link.speed_up) == "1 Mbit/s" and found.link.rtt_ns == 30e6
    assert found.rows()[0]["edge_energy_j"] > 0
    with pytest.raises(SpecError, match="no candidate satisfies the constraints"):
        edge_client.plan("none", "digits", max_edge_memory="1kB", **reported)
    with pytest.raises(SpecError, match="needs uplink and rtt"):
        edge_client.plan("none", "digits", uplink="1mbit")


def test_a_module_is_planned_against_the_one_model_that_the_server_has(server: str, digits: nn.Module) -> None:
    (image,), _ = load_spec("digits").preprocess(IMAGE)
    found = edge_client.plan(server, digits, image.numpy(), **QUICK)
    assert found.model == "digits" and len(found.candidates) == 51
    with edge_client.EdgeClient(server, ModelChoice(digits, model_id="digits"), split="classifier") as client:
        assert client.infer(image).output.shape == (1, 10)  # the module is as it was


def test_a_profile_tells_the_slowest_layers_of_both_sides(server: str) -> None:
    found = edge_client.profile(server, "digits", warmup=1, **QUICK)
    assert {row["side"] for row in found.rows()} == {"edge", "cloud"}
    slowest = found.slowest("edge", 3)
    times = [layer.inference_ns.median for layer in slowest]
    assert len(times) == 3 and times == sorted(times, reverse=True)
    assert found.slowest("cloud", 1)[0].name
    same_frames(found)
    alone = edge_client.profile("none", net(), np.zeros((1, 3, 8, 8), np.float32), warmup=1, **QUICK)
    assert alone.cloud is None and len(alone.rows()) == 5
    with pytest.raises(SpecError, match="cloud's side was not measured"):
        alone.slowest("cloud")


def test_a_profile_without_its_server_is_raised_or_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*args: object, **kwargs: object) -> None:
        raise ServerUnavailable("no server at here:1")

    monkeypatch.setattr("edge_client.tasks.profile.fetch_profile", gone)
    how: Any = {"warmup": 1, **QUICK}
    with pytest.raises(ServerUnavailable):
        edge_client.profile("here:1", "digits", side="cloud", failures="return", **how)
    found = edge_client.profile(
        "here:1", ModelChoice(net(), model_id="net"), torch.zeros(1, 3, 8, 8), failures="return", **how
    )
    assert found.cloud is None and isinstance(found.failure, ServerUnavailable) and len(found.rows()) == 5


def test_a_sweep_takes_arrays_and_continues_where_it_stopped(server: str, tmp_path: Path) -> None:
    inputs = [load_spec("digits").preprocess(IMAGE)[0][0].numpy(), IMAGE]
    how: Any = {"cuts": [CUT], "repetitions": 1, "predict": False, "progress": False, "output": tmp_path / "out"}
    said: list[str] = []
    first = edge_client.sweep(server, "digits", inputs, seconds=1e-6, say=said.append, **how)
    assert (first.measured, first.inputs) == (1, 2) and "budget" in str(first.ended)
    found = edge_client.sweep(server, "digits", inputs, say=said.append, **how)
    assert found.measured == 2 and found.ended is None and any("going on after 1 of 2" in line for line in said)
    assert [(way.name, way.mode) for way in found.ways] == [
        ("edge-only", "local"),
        ("cloud-only", "networked"),
        (CUT, "networked"),
        (CUT, "local"),
    ]
    assert all(way.exact == way.answered == 4 for way in found.ways)
    assert found.best is not None and found.report.is_file()
    assert set(found.requests()["input"]) == {"input 0", IMAGE.name} and found.layers().height > 0
    same_frames(found)
    other = [np.zeros_like(inputs[0]), IMAGE]
    with pytest.raises(SpecError, match="holds another sweep"):
        edge_client.sweep(server, "digits", other, **how)


def test_a_sweep_that_loses_its_server_returns_or_raises(tmp_path: Path) -> None:
    how: Any = {"output": tmp_path, "cuts": [CUT], "predict": False, "progress": False, "patience": 0.1}
    found = edge_client.sweep("127.0.0.1:1", "digits", failures="return", **how)
    assert isinstance(found.failure, ServerUnavailable) and found.summary is None and found.rows() == []
    assert "nothing was measured" in str(found) and "nothing" in repr(found)
    with pytest.raises(ServerUnavailable):
        edge_client.sweep("127.0.0.1:1", "digits", **how)


def test_channels_are_pruned_on_labelled_arrays(tmp_path: Path) -> None:
    dice = np.random.default_rng(0)
    data = [(dice.normal(at % 4, 1, (1, 3, 8, 8)).astype(np.float32), at % 4) for at in range(16)]
    found = edge_client.prune(net(), "0", data, keep=[4], scores=["variance"], seeds=2, output=tmp_path, progress=False)
    assert [(row["scoring"], row["keep"]) for row in found.rows()] == [("variance", 4), ("random", 4), ("random", 4)]
    assert found.chosen == {4: "variance"} and found.all_exact and found.report.served == ()
    assert (tmp_path / "mask-4.safetensors").is_file() and (tmp_path / "report.html").is_file()
    same_frames(found)
    with pytest.raises(SpecError, match="input 3 is also in choose_by"):
        edge_client.prune(net(), "0", data[:8], choose_by=data[3:4] * 1 + data[8:], progress=False)
    with pytest.raises(SpecError, match="cannot be served by another"):
        edge_client.prune(net(), "0", data, serve=True, scores="variance", progress=False)


def test_the_hierarchy_is_a_tree_and_rows(tmp_path: Path) -> None:
    found = edge_client.hierarchy(net(), torch.zeros(1, 3, 8, 8), graphml=tmp_path / "map.graphml")
    assert [row["tag"] for row in found.rows()][:2] == ["/Sequential", "/Sequential/Conv2d.0"]
    assert found.ok and "├── Conv2d.0" in str(found) and (tmp_path / "map.graphml").is_file()
    same_frames(found)


def test_layers_have_shapes_parameters_and_macs() -> None:
    found = edge_client.layers(net(), torch.zeros(1, 3, 8, 8))
    conv, last = found["0"], found[4]
    assert (conv.shape, conv.parameters, conv.macs) == ("1x8x6x6", 224, 8 * 36 * 27)
    assert (last.layer_type, last.parameters, len(found), len(found.cuts)) == ("Linear", 36, 5, 5)
    assert found.parameters == 260 and found.macs == 8 * 36 * 27 + 32
    same_frames(found)
    with pytest.raises(UnknownLayer, match="no layer or block"):
        found["nothing"]


class Summed(nn.Module):
    """Two blocks whose sum is in their own code: twice the bytes cross inside them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.head(self.blocks(self.stem(x)).mean((2, 3))))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, x + self.relu(self.conv(x)))


def test_layers_are_a_tree_whose_blocks_say_what_crosses_at_their_end() -> None:
    found = edge_client.layers(Summed().eval(), torch.zeros(1, 3, 8, 8))
    whole = 4 * 8 * 8 * 4
    assert found["blocks.0"].is_block and found["blocks.0"].frontier_bytes == whole
    assert found["blocks.0.conv"].frontier_bytes == 2 * whole
    assert found.dominated == {"blocks.0.conv", "blocks.0.relu", "blocks.1.conv", "blocks.1.relu"}
    assert {row["name"] for row in found.rows() if row["worse"]} == found.dominated
    text = found.text().splitlines()
    (block,) = (line for line in text if line.strip().startswith("0  ") and "Block" in line)
    assert block.rstrip().endswith("yes") and "1.0 KiB" in block
    assert sum(line.rstrip().endswith("worse") for line in text) == 4
    assert any("blocks" in line and line.rstrip().endswith("= blocks.1") for line in text)


def test_every_cut_is_verified_here_and_through_a_server(server: str, digits: nn.Module) -> None:
    here = edge_client.verify("none", net(), torch.randn(1, 3, 8, 8), progress=False)
    assert here and here.ok and [one.verdict for one in here.cuts] == ["exact"] * 6
    same_frames(here)
    through = edge_client.verify(server, digits, load_spec("digits").preprocess(IMAGE)[0], progress=False)
    assert through.ok and len(through.cuts) == 50 and through.server == server
    assert {one.verdict for one in through.cuts} <= {"exact", "refused"}


# -- what people have, and what they get wrong ----------------------------------------------------------------------


def test_a_module_comes_back_untouched() -> None:
    module = net()
    before = dict(vars(module[0]))  # type: ignore[index]
    edge_client.layers(module, torch.zeros(1, 3, 8, 8))
    assert vars(module[0]).keys() == before.keys() and "forward" not in vars(module[0])  # type: ignore[index]


@pytest.mark.parametrize(
    ("model", "inputs", "error", "says"),
    [
        ("digit", None, UnknownModel, "Did you mean digits"),
        (3, None, SpecError, "a model is a name, a TOML file"),
        (Path("absent.toml"), None, SpecError, "absent.toml"),
        (net(), None, SpecError, "no example input to plan on"),
        (nn.Linear(2, 2), torch.zeros(1, 2), SpecError, "call its eval"),
        ("digits", object(), InputMismatch, "an input of type object is not taken"),
        (net(), b"text", InputMismatch, "these 4 bytes are no picture"),
        ("digits", "absent.png", InputMismatch, "no such input: absent.png"),
        ("digits", [], InputMismatch, "the list is empty"),
        (net(), np.array(["a"]), InputMismatch, "is no tensor"),
    ],
)
def test_invalid_model_or_input_is_one_line(model: Any, inputs: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        edge_client.layers(model, inputs)
    assert "\n" not in str(caught.value)


def test_a_model_in_the_servers_place_and_a_form_that_is_not_the_examples(server: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="the server comes first, then the model"):
        edge_client.plan("digits", "digits")
    with pytest.raises(SpecError, match="another form"):
        edge_client.plan(server, "digits", torch.zeros(2, 1, 32, 32), progress=False)
    with pytest.raises(SpecError, match="cloud-server with a spec that makes it"):
        edge_client.plan("own", net(), torch.zeros(1, 3, 8, 8), progress=False)
    with pytest.raises(UnknownLayer, match="^cuts: no layer"):
        edge_client.sweep(server, "digits", output=tmp_path, cuts="stage9", progress=False)
    with pytest.raises(CutRefused, match="no layer runs before it"):
        edge_client.prune("digits", "input", str(IMAGE.parent), progress=False)


def test_the_default_server_is_the_settings(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_SERVER", server)
    assert edge_client.verify(None, "digits", progress=False).server == server


def test_missing_libraries_are_named(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(SpecError, match='pandas missing: pip install "pandas"'):
        planned.to_pandas()
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(SpecError, match=r'polars missing: pip install "isthmus\[sweep\]"'):
        planned.to_polars()


def test_foreign_names_are_inert_in_a_notebook() -> None:
    class Evil(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("<script>alert(1)</script>", nn.Linear(2, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = next(self.children())(x)
            return result

    html = edge_client.layers(Evil().eval(), torch.zeros(1, 2))._repr_html_()
    assert "<script>" not in html and "&lt;script&gt;" in html


def test_missing_numbers_of_things_stay_numbers(planned: Planned) -> None:
    assert str(planned.to_pandas()["layer_id"].dtype) == "Int64"
    assert planned.to_polars()["layer_id"].dtype == pl.Int64


@pytest.mark.parametrize(
    ("task", "how", "says"),
    [
        ("plan", {"uplink": 5, "rtt": 30}, "uplink 5: expected 5mbit"),
        ("plan", {"power": 5}, "power: expected watts"),
        ("plan", {"max_edge_memory": "64 apples"}, "max_edge_memory '64 apples': expected 64MiB"),
        ("plan", {"objective": "beauty"}, "objective 'beauty': one of latency"),
        ("plan", {"repetitions": 0}, "repetitions=0: must be"),
        ("plan", {"codec": "zip"}, "must be one of raw, lz4"),
        ("plan", {"partitioner": "lateny"}, "Did you mean latency"),
        ("profile", {"side": "left"}, "side='left': must be"),
        ("sweep", {"output": "/etc/passwd/x"}, "cannot be a folder of results"),
        ("sweep", {"output": "x", "every": 0}, "every=0: must be"),
        ("sweep", {"output": "x", "repetitions": 0}, "repetitions=0: must be"),
        ("sweep", {"output": "x", "observers": ["activatoin"]}, "Did you mean activation"),
    ],
)
def test_a_wrong_word_is_reported_before_anything_is_measured(
    task: str, how: dict[str, Any], says: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=says) as caught:
        getattr(edge_client, task)(server, "digits", progress=False, **how)
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())
