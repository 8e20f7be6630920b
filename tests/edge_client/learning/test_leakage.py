"""The meter: its scale is measured at both ends, figures repeat, plans keep to a bound."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from edge_client import leakage
from edge_client.__main__ import main
from edge_client.learning.inversion import Feature, Split, invert, noise_features, picture_scores, tokens_recovered
from edge_client.model_choice import ModelChoice
from edge_client.planning.leakage import LeakageBound, LeakageTable, Spread, bound_of, from_json, read
from edge_client.planning.objective import Candidate, Constraints, decide
from edge_client.tasks.leakage import Leaked, _between
from shared_hooks.errors import SpecError
from shared_hooks.metrics import Reading

DICE = torch.Generator().manual_seed(0)


def blobs(count: int) -> list[torch.Tensor]:
    """Pictures of a bright spot somewhere."""
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    places = torch.rand(count, 2, generator=DICE) * 12 + 2
    return [
        2 * torch.exp(-((rows - place[0]) ** 2 + (columns - place[1]) ** 2) / 5)[None, None] - 1 for place in places
    ]


PICTURES = blobs(96)
STEPS = 25


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("leaked")


@pytest.fixture(scope="module")
def found(folder: Path) -> Leaked:
    choice = ModelChoice("digits", device="cpu", threads=1)
    how: dict[str, Any] = {"splits": "input,stage1,classifier", "seeds": 2, "steps": STEPS, "progress": False}
    return leakage(choice, PICTURES, codecs="raw,noise:30", output=folder, **how)


def test_the_ends_of_the_scale_are_measured(found: Leaked) -> None:
    table = found.table
    assert table.kind == "pictures" and table.attacked == 24 and table.seeds == 2
    assert table.raw["ssim"] > 0.9 > table.average["ssim"]
    by = {(one.cut, one.codec): one for one in table.cuts}
    assert by["input", "raw"].leakage.mean > 0.95
    assert by["classifier", "raw"].leakage.mean < 0.8
    assert by["input", "noise:30"].leakage.mean < by["input", "raw"].leakage.mean - 0.3
    assert all(
        len(one.leakage.each) == 2 and one.leakage.low <= one.leakage.mean <= one.leakage.high for one in table.cuts
    )
    assert "lower bounds" in found.text() and "(only the average)" in found.text()


def test_the_page_has_pictures_and_says_what_it_does_not_know(found: Leaked, folder: Path) -> None:
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 8 and "may read more" in page
    assert len(list((folder / "pictures").iterdir())) == 8


def test_the_same_call_continues_and_gives_the_same(found: Leaked, folder: Path) -> None:
    said: list[str] = []
    choice = ModelChoice("digits", device="cpu", threads=1)
    how: dict[str, Any] = {"splits": "input,stage1,classifier", "seeds": 2, "progress": False, "say": said.append}
    again = leakage(choice, PICTURES, codecs="raw,noise:30", output=folder, steps=STEPS, **how)
    assert again.table.cuts == found.table.cuts and "continuing after 14 attacks" in said[0]
    with pytest.raises(SpecError, match="holds another leakage"):
        leakage(choice, PICTURES, output=folder, steps=STEPS + 1, **how)


def test_a_file_is_read_strictly(found: Leaked, folder: Path) -> None:
    table = read(folder / "leakage.json")
    assert replace(table, created=found.table.created) == found.table
    data = json.loads((folder / "leakage.json").read_text())
    for key, value in (("format", "x"), ("version", 9), ("cuts", {}), ("seeds", "2"), ("average", [])):
        with pytest.raises(SpecError):
            from_json({**data, key: value}, "file")
    data["cuts"][0]["leakage"]["high"] = 1.5
    with pytest.raises(SpecError, match="from 0 to 1"):
        from_json(data, "file")
    with pytest.raises(SpecError, match="of other weights"):
        table.check("0" * 64)


def candidate(name: str, layer: int | None, ns: float, codec: str = "") -> Candidate:
    nothing = Reading.unavailable("none")
    return Candidate(name, layer, {"edge": ns}, 10, 10, nothing, nothing, codec=codec)


def test_a_plan_keeps_to_a_bound(found: Leaked) -> None:
    by = {(one.cut, one.codec): one.leakage.high for one in found.table.cuts}
    stage1 = next(cut for cut, _ in by if cut.startswith("stage1"))
    most = (by[stage1, "raw"] + by["classifier", "raw"]) / 2
    ways = [
        candidate("cloud-only", -1, 1.0),
        candidate(stage1, 9, 2.0),
        candidate("stem.0", 0, 3.0),
        candidate("classifier", 40, 4.0),
        candidate("edge-only", None, 5.0),
    ]
    decision = decide(ways, constraints=Constraints(leakage=bound_of(most, found.table)))
    assert decision.winner.name == "classifier"
    assert "leakage unknown" in decision.rejected["stem.0"] and "at most" in decision.rejected[stage1]
    assert decide(ways, constraints=Constraints(leakage=bound_of(0.0, found.table))).winner.name == "edge-only"
    noisy = LeakageBound(found.table, most, "noise:30")
    assert noisy.of(stage1) == by[stage1, "noise:30"] and noisy.of(stage1, "int8") is None
    assert LeakageBound(found.table, most).of(stage1, "noise:30") == max(by[stage1, "raw"], by[stage1, "noise:30"])
    assert LeakageBound(found.table, most).of(stage1, "lz4") == by[stage1, "raw"], "lossless is as raw"
    assert noisy.of("cloud-only-file") == 1.0 and noisy.of("edge-only") == 0.0


@pytest.mark.parametrize(("most", "text"), [(None, "go together"), (1.5, "from 0 to 1"), (math.nan, "from 0 to 1")])
def test_bounds_that_are_none(most: float | None, text: str, found: Leaked) -> None:
    with pytest.raises(SpecError, match=text):
        bound_of(most, found.table)
    with pytest.raises(SpecError, match="go together"):
        bound_of(0.3, None)


def test_inverting_noise_gives_no_more_than_the_average() -> None:
    import numpy as np

    target = torch.cat(PICTURES)
    parts = Split.of(len(target), 0, 24)
    features = noise_features([Feature(torch.zeros(96, 4, 8, 8), True)], np.random.default_rng(0))
    made = invert(features, target, parts.learn, seed=0, steps=40).given_back(parts.attacked)
    mean = target[parts.learn].mean(0, keepdim=True).expand_as(made)
    ours, average = (picture_scores(one, target[parts.attacked], 2.0)["ssim"] for one in (made, mean))
    assert ours < average + 0.02, "few examples are learnt by heart, which helps no attacker"


class Tiny(nn.Module):
    """Tokens -> classes."""

    def __init__(self, words: int = 50) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 24)
        self.first, self.last = nn.Linear(24, 24), nn.Linear(24, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.tanh(self.first(self.embedding(ids))).mean(1))
        return found


def test_tokens_are_reported_by_the_embedding_and_by_a_probe() -> None:
    torch.manual_seed(0)
    tokens = [torch.randint(0, 50, (1, 12)) for _ in range(60)]
    found = leakage(Tiny().eval(), tokens, splits="input,embedding,first", seeds=2, progress=False)
    by = {one.cut: one for one in found.table.cuts}
    assert found.table.kind == "tokens" and found.table.average["recovered"] < 0.1
    assert by["input"].leakage.mean == 1.0 and by["embedding"].scores["nearest"].mean == 1.0
    assert by["first"].scores["probe"].mean > 0.8 > by["first"].scores["nearest"].mean


def test_tokens_of_no_embedding_and_of_nothing_that_tells() -> None:
    tokens = torch.randint(0, 9, (40, 6))
    parts = Split.of(40, 0, 10)
    nothing = [Feature(torch.zeros(40, 1, 5), False)]
    assert tokens_recovered(nothing, tokens, None, parts.learn, parts.attacked)["recovered"] == 0.0
    shown = [Feature(torch.nn.functional.one_hot(tokens, 9).float(), False)]
    assert tokens_recovered(shown, tokens, None, parts.learn, parts.attacked)["recovered"] > 0.95


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.tanh(self.first(x)))
        return found


def test_private_labels_count_and_a_public_set_teaches(tmp_path: Path) -> None:
    import numpy as np

    torch.manual_seed(0)
    rows, lines = [torch.randn(1, 10) for _ in range(120)], []
    for number, row in enumerate(rows):
        np.save(tmp_path / f"{number}.npy", row.numpy())
        lines.append(f"{number}.npy,{'high' if row[0, 0] > 0 else 'low'}")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    net = Rows().eval()
    how: dict[str, Any] = {"splits": "first", "seeds": 2, "steps": 1, "progress": False}
    found = leakage(net, f"{tmp_path}/*.npy", labels=tmp_path / "labels.csv", **how)
    (first,) = found.table.cuts
    assert first.scores["labels"].mean > 0.85 > found.table.average["labels"]
    assert first.leakage.mean > 0.8, "one step of training gives no row back: the label is what leaks"
    public = leakage(net, rows[:30], public=rows[30:], splits="first", seeds=1, steps=150, progress=False)
    assert public.table.public == 90 and public.table.inputs == 30 == public.table.attacked
    assert public.table.cuts[0].leakage.mean > 0.7
    with pytest.raises(SpecError, match="of which an attacker has no labels"):
        leakage(net, f"{tmp_path}/*.npy", labels=tmp_path / "labels.csv", public=rows, **how)


def test_a_mask_beside_tokens_is_not_what_is_attacked() -> None:
    class Masked(Tiny):
        def forward(self, mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            found: torch.Tensor = self.last((self.embedding(ids) * mask[..., None]).mean(1))
            return found

    torch.manual_seed(0)
    calls = [(torch.ones(1, 12, dtype=torch.int64), torch.randint(0, 50, (1, 12))) for _ in range(30)]
    found = leakage(Masked().eval(), calls, splits="embedding", seeds=1, progress=False)
    assert found.table.average["recovered"] < 0.2 and found.table.cuts[0].leakage.mean == 1.0


def test_inputs_that_are_all_the_same_leak_nothing_that_could_be_measured() -> None:
    with pytest.raises(SpecError, match="all the same"):
        leakage(Rows().eval(), [torch.ones(1, 10)] * 20, splits="first", seeds=1, progress=False)


def test_where_the_raw_input_says_nothing_what_says_more_is_all_there_is() -> None:
    assert _between({"labels": 0.9}, ({"labels": 0.5}, {"labels": 0.5}), "labels") == 1.0
    assert _between({"labels": 0.5}, ({"labels": 0.5}, {"labels": 0.4}), "labels") == 0.0
    assert _between({"ssim": 0.5}, ({"ssim": 0.0}, {"ssim": 1.0}), "ssim") == 0.5


def test_numbers() -> None:
    torch.manual_seed(0)
    rows = [torch.randn(1, 10) for _ in range(80)]
    found = leakage(Rows().eval(), rows, splits="first", seeds=2, steps=150, progress=False)
    assert found.table.kind == "numbers" and found.table.cuts[0].leakage.mean > 0.7


def test_a_seed_alone_is_reported(tmp_path: Path) -> None:
    rows = [torch.randn(1, 12) for _ in range(40)]
    found = leakage(
        nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2)).eval(),
        rows,
        splits="0",
        seeds=1,
        steps=30,
        progress=False,
    )
    assert "one seed shows no spread" in found.warnings[0]
    assert isinstance(found.table.cuts[0].leakage, Spread) and isinstance(found.table, LeakageTable)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"codecs": "int88"}, "must be one of"),
        ({"decoder": "huge"}, "must be one of"),
        ({"seeds": 0}, "at least 1"),
        ({"steps": 0}, "at least 1"),
        ({"splits": "nowhere"}, "nowhere"),
        ({"splits": "stem", "every": 2}, "every"),
        ({"inputs": PICTURES[:5]}, "too few"),
    ],
)
def test_bad_words(words: dict[str, Any], text: str) -> None:
    how: dict[str, Any] = {"inputs": PICTURES[:20], "seeds": 1, "steps": 1, **words}
    with pytest.raises(Exception, match=text):
        leakage(ModelChoice("digits", device="cpu"), how.pop("inputs"), progress=False, **how)


def test_the_command_tells_a_missing_partner(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--max-leakage", "0.3", "--server", "none"]) == 2
    assert "--max-leakage and --leakage go together" in capsys.readouterr().err
