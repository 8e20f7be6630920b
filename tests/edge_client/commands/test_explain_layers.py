"""``edge-client layers --explain``: what crosses, why, and what the tail does, truly and within the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from edge_client.__main__ import main
from shared_hooks import WrappedModel
from shared_hooks.errors import CutRefused, UnknownLayer
from shared_hooks.explaining import Explanation, Sent
from tests.edge_client.small_models import Residual

Captured = pytest.CaptureFixture[str]


class InPlace(nn.Module):
    """What the first layer gives is doubled in place before the cut, and cleared after it: input (2, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.first(values)
        hidden.mul_(2)
        out: Tensor = self.second(hidden[:1])
        hidden[1].zero_()
        return out + hidden


class Deciding(nn.Module):
    """Reads a number before the cut, makes a tensor of numbers after that, and branches after the cut: input (2, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.first(values)
        many = values[0, 0].item() > 0
        table = torch.zeros(2, 4)
        table[0] = hidden[0]
        out: Tensor = self.second(hidden)
        if out.sum().item() > 0:
            return out + table
        return out + hidden + table if many else out - table


class Keeping(nn.Module):
    """Draws in its second layer; the third refuses nothing: input (2, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        out: Tensor = self.last(self.drop(self.first(values)))
        return out


class Counting(nn.Module):
    """Keeps what it saw: no cut is possible."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.seen = torch.zeros(2, 4)

    def forward(self, values: Tensor) -> Tensor:
        self.seen = self.first(values) + self.seen
        out: Tensor = self.last(self.seen)
        return out


def explained(model: nn.Module, cut: str, *inputs: Tensor) -> Explanation:
    with WrappedModel(model.eval()) as wrapped:
        return wrapped.explain(cut, *inputs)


def by_value(explanation: Explanation) -> dict[str, Sent]:
    return {one.value: one for one in explanation.sent}


def test_a_skip_connection_is_reported_with_both_its_readers() -> None:
    found = explained(Residual(), "body", torch.randn(1, 3, 16, 16))
    sent = by_value(found)
    assert set(sent) == {"the result of conv2d in stem", "the result of conv2d in body"}
    assert {one.read_by for one in found.sent} == {"add in the model itself"}
    assert [one.shape for one in found.sent] == [(1, 8, 16, 16)] * 2
    assert found.sent_bytes == 2 * 8 * 16 * 16 * 4
    assert (found.skipped, found.entered, found.answered) == (2, 1, 0)
    assert any("skip body: slot 1 as float32[1, 8, 16, 16]" in step for step in found.steps)


def test_writes_in_place_on_both_sides_of_the_cut_are_reported() -> None:
    found = explained(InPlace(), "second", torch.randn(2, 4))
    hidden = by_value(found)["the result of linear in first"]
    assert hidden.written_before == "mul_ in the model itself"
    assert hidden.written_by == "zero_ in the model itself"
    assert hidden.read_by == "add in the model itself"
    assert (hidden.sent_bytes, hidden.storage_bytes) == (16, 32)  # the other row is overwritten before it is read
    assert "16 bytes of 32 bytes" in str(found)
    assert "also written in place by zero_ in the model itself" in str(found)


def test_values_read_from_data_and_other_paths_are_reported() -> None:
    model = Deciding().eval()
    nn.init.zeros_(model.second.weight)
    nn.init.ones_(model.second.bias)
    with WrappedModel(model) as wrapped:
        inputs = torch.ones(2, 4)
        found = wrapped.explain("second", inputs)
        assert [(read.what, read.where, read.value) for read in found.reads] == [("item", "the model itself", "1.0")]
        assert found.whole
        assert not any(one.other_path for one in found.sent)
        nn.init.constant_(model.second.bias, -1)
        again = by_value(wrapped.explain("second", inputs))
        assert not again["the result of linear in first"].other_path
        assert again["the result of zeros in the model itself"].other_path
        early = wrapped.head("second", inputs)
        assert torch.equal(wrapped.tail(early), wrapped.whole(inputs))


def test_constants_created_after_a_data_read_are_made_in_the_tail() -> None:
    with WrappedModel(Deciding().eval()) as edge, WrappedModel(Deciding().eval()) as cloud:
        cloud.model.load_state_dict(edge.model.state_dict())
        inputs = torch.randn(2, 4)
        assert torch.equal(cloud.tail(edge.head("second", inputs)), edge.whole(inputs))


def test_generators_are_reported() -> None:
    with WrappedModel(Keeping()) as wrapped:
        found = wrapped.explain("first", torch.randn(2, 4))
    assert found.generators == ("torch",)
    assert "torch's random number generator, as it is at the cut" in str(found)


def test_before_the_first_layer_the_inputs_cross() -> None:
    found = explained(Residual(), "input", torch.randn(1, 3, 16, 16))
    assert [one.value for one in found.sent] == ["input 0"]
    assert found.sent[0].read_by == "conv2d in stem"
    assert found.steps == ()
    assert "the whole model is the tail" in str(found)


def test_explaining_leaves_everything_as_it_was() -> None:
    inputs, model = torch.randn(2, 4), Keeping()  # in training mode, so it draws
    random = torch.get_rng_state()
    with WrappedModel(model) as wrapped:
        wrapped.explain("first", inputs)
        assert torch.equal(torch.get_rng_state(), random)
        assert wrapped.durations() == {}  # no forward was run


def test_a_refused_cut_raises_with_the_reason() -> None:
    with pytest.raises(CutRefused, match="keeps state"):
        explained(Counting(), "first", torch.randn(2, 4))
    with pytest.raises(UnknownLayer, match="Did you mean"):
        explained(Residual(), "bod", torch.randn(1, 3, 16, 16))


def test_long_lists_are_folded_unless_all_is_wanted() -> None:
    model = nn.Sequential(*(Residual(8) if i == 0 else nn.Linear(10, 10) for i in range(60)))
    found = explained(model, "59", torch.randn(1, 3, 16, 16))
    assert len(found.steps) > 50
    assert "more)" in str(found)
    assert "skip 30" not in str(found)
    assert "skip 30" in found.text(everything=True)
    assert max(map(len, str(found).splitlines())) <= 80


# -- the command ------------------------------------------------------------------------------------------------


def test_the_command_prints_lines_that_fit(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    assert main(["layers", "--explain", "stage2.0.conv2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("cut after layer 20: stage2.0.conv2 (Conv2d)\n")
    assert "read by conv2d in stage2.0.shortcut.0" in out
    assert max(map(len, out.splitlines())) <= 72


def test_the_command_writes_the_facts_as_json(capsys: Captured) -> None:
    assert main(["layers", "--explain", "20", "--json", "-"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["layer_name"], facts["model"]) == ("stage2.0.conv2", "digits")
    assert [one["sent_bytes"] for one in facts["sent"]] == [16384, 8192]
    assert facts["description_bytes"] > 0


def test_the_command_names_neighbours_of_an_unknown_layer(capsys: Captured) -> None:
    assert main(["layers", "--explain", "stage2.0.con"]) == 2
    assert "--explain stage2.0.con: no such layer" in capsys.readouterr().err
    assert main(["layers", "--explain", "stag2"]) == 2
    assert "Did you mean stage2, " in capsys.readouterr().err
    assert main(["layers", "--explain", "stage2"]) == 0
    assert "stage2.1.relu#2" in capsys.readouterr().out


def test_the_command_says_why_a_cut_is_refused(capsys: Captured, tmp_path: Path) -> None:
    spec = tmp_path / "counting.toml"
    spec.write_text(
        f'id = "counting"\nfactory = "{__name__}:Counting"\n[[example.args]]\nshape = [2, 4]\n', encoding="utf-8"
    )
    assert main(["layers", "--model", str(spec), "--explain", "first"]) == 1
    out = capsys.readouterr().out
    assert "keeps state" in out
    assert "nearest cuts: none" in out


def test_a_set_of_calls_is_explained(capsys: Captured) -> None:
    assert main(["layers", "--model", "digits", "--explain", "stage2.0.conv1,stage2.0.shortcut"]) == 0
    said = capsys.readouterr().out
    assert "stage2.0.conv1 + stage2.0.shortcut" in said.splitlines()[0] and "skip stage2.0.shortcut" in said
    assert main(["layers", "--model", "digits", "--explain", "stage2.0.conv1,nowhere"]) == 2
    assert "--explain nowhere: no such layer" in capsys.readouterr().err
