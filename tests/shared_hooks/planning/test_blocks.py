"""A block as a cut: after it has returned, with what its own code does behind its last layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.errors import CutRefused, UnknownLayer
from shared_hooks.planning.cutting import blocks, last_layer


class Twice(nn.Module):
    """One block called twice, another that shares it under a second name; a block whose last child runs first."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.alias = self.body
        self.odd = nn.ModuleDict({"late": nn.Linear(4, 4), "early": nn.Linear(4, 4)})
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.body(x) + 1)
        hidden = self.odd["late"](self.odd["early"](hidden))
        out: torch.Tensor = self.last(hidden)
        return out


def test_where_nothing_runs_between_a_block_ends_where_its_last_layer_does() -> None:
    x = torch.randn(2, 4)
    with WrappedModel(Twice().eval()) as wrapped:
        plan = wrapped.plan(x)
        names = [layer.name for layer in plan.layers]
        assert names == ["body.0", "body.1", "body.0#2", "body.1#2", "odd.early", "odd.late", "last"]
        cuts = ("body", "alias", "body#2", "alias#2", "odd", "last", "3")
        assert [plan.place(cut) for cut in cuts] == [1, 1, 3, 3, 5, 6, 3]
        assert [plan.layer_id(cut) for cut in cuts] == [1, 1, 3, 3, 5, 6, 3] and not plan.blocks
        whole = wrapped.whole(x)
        early = wrapped.head("odd", x)
        assert early.crossing.layer_name == "odd.late" and torch.equal(wrapped.tail(early), whole)


class Residual(nn.Module):
    """The sum and the activation are in its own code, behind its last layer."""

    def __init__(self, *, twice: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 16), nn.Linear(16, 4)
        self.twice = twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.relu(x + self.second(self.first(x).tanh()))
        return out * 2 if self.twice else out


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stage = nn.Sequential(Residual(), Residual(twice=True))
        self.more = nn.ModuleList([Residual(), Residual()])
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stage(x)
        for one in self.more:
            x = one(x)
        out: torch.Tensor = self.last(x)
        return out


def test_a_block_is_cut_after_it_has_returned() -> None:
    x = torch.randn(3, 4)
    with WrappedModel(Stack().eval()) as edge, WrappedModel(Stack().eval()) as cloud:
        cloud.model.load_state_dict(edge.model.state_dict())
        plan, whole = edge.plan(x), edge.whole(x)
        assert [block.name for block in plan.blocks] == ["stage.0", "stage.1", "more.0", "more.1"]
        assert [block.layer_id for block in plan.blocks] == [1, 3, 5, 7]
        for cut, name in (("stage.0", "stage.0"), ("stage", "stage.1"), ("more", "more.1"), ("…re.0", "more.0")):
            early = edge.head(cut, x)
            assert early.crossing.layer_name == name and early.nbytes == x.nbytes
            assert plan.frontier_bytes(cut) == x.nbytes < plan.frontier_bytes(plan.layer_id(cut))
            assert torch.equal(cloud.tail(EarlyOutput.from_bytes(early.to_bytes(), max_bytes=1 << 20)), whole)
        assert torch.equal(edge.head("stage.0", x).tensors[0].view(3, 4), edge.model.stage[0](x))


def test_a_middle_part_begins_or_ends_with_a_block() -> None:
    x = torch.randn(3, 4)
    with WrappedModel(Stack().eval()) as wrapped:
        whole = wrapped.whole(x)
        names = ["input", "stage.0.first", "stage.0", "stage.1.second", "stage.1", "more.0.first", "more.1", "last"]
        for begin in range(len(names) - 1):
            for end in range(begin + 1, len(names)):
                early = wrapped.forward(wrapped.head(names[begin], x), end=names[end])
                assert early.crossing.layer_name == names[end]
                assert torch.equal(wrapped.tail(early), whole), (names[begin], names[end])
        with pytest.raises(CutRefused, match="comes before start='stage.0'"):
            wrapped.forward(wrapped.head("stage.0", x), end="stage.0.second")


@pytest.mark.parametrize(
    ("cut", "near"), [("bodi", "body"), ("bod", "body"), ("odd.lat", "odd.late"), ("inptu", "input")]
)
def test_near_names(cut: str, near: str) -> None:
    with WrappedModel(Twice().eval()) as wrapped:
        plan = wrapped.plan(torch.randn(2, 4))
        with pytest.raises(UnknownLayer, match=f"Did you mean .*{near}") as raised:
            plan.layer_id(cut)
    suggested = str(raised.value).partition("Did you mean ")[2].rstrip("?").split(", ")
    assert len(suggested) == len(set(suggested)), "each once"


def test_blocks_of_names() -> None:
    assert blocks(["a.b.c", "a.b.d#2", "e"]) == ["a", "a.b"]
    assert last_layer("a.b", {"a.b.c": 0, "a.b.d#2": 4, "a.bb.c": 9}) == 4
    assert last_layer("e", {"e": 0}) is None


def test_a_shortened_name_is_the_one_layer_that_it_fits() -> None:
    ids = {"encoder.layers.0.conv": 0, "encoder.layers.1.conv": 1, "head": 2}
    assert last_layer("…1.conv", ids) == last_layer("encode…1.conv", ids) == 1
    assert last_layer("he…", ids) == 2 and last_layer("…layers.1", ids) == 1
    for several_or_none in ("…conv", "…", "…2.conv", "layers…"):
        assert last_layer(several_or_none, ids) is None
