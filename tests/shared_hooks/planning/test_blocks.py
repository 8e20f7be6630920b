"""A block as a cut: after the last of its layers that ran, however it is called; near names are offered."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shared_hooks import WrappedModel
from shared_hooks.errors import UnknownLayer
from shared_hooks.planning.liveness import blocks, last_layer


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


def test_a_block_is_its_last_layer_in_every_call() -> None:
    x = torch.randn(2, 4)
    with WrappedModel(Twice().eval()) as wrapped:
        plan = wrapped.plan(x)
        names = [layer.name for layer in plan.layers]
        assert names == ["body.0", "body.1", "body.0#2", "body.1#2", "odd.early", "odd.late", "last"]
        assert [plan.layer_id(cut) for cut in ("body", "alias", "odd", "last", "3")] == [3, 3, 5, 6, 3]
        whole = wrapped.whole(x)
        early = wrapped.head("odd", x)
        assert early.crossing.layer_name == "odd.late" and torch.equal(wrapped.tail(early), whole)


@pytest.mark.parametrize(("cut", "near"), [("bodi", "body"), ("odd.lat", "odd.late"), ("inptu", "input")])
def test_near_names(cut: str, near: str) -> None:
    with WrappedModel(Twice().eval()) as wrapped:
        plan = wrapped.plan(torch.randn(2, 4))
        with pytest.raises(UnknownLayer, match=f"Did you mean .*{near}"):
            plan.layer_id(cut)


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
