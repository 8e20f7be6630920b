"""Values in few words; and tables and pictures in which nothing of what they show can do anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shared_hooks import LayerMetrics, WrappedModel
from shared_hooks.planning import LayerInfo, PlanLayers
from shared_hooks.showing import brief
from shared_hooks.verification import Report
from tests.shared_hooks.shown import check, read


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("short", "'short'"),
        (10**500, "an integer of 1661 bits"),
        (list(range(9)), "[0, 1, 2, 3, … 5 more]"),
        ((1,), "(1,)"),
        ({"a": [{"b": {"c": 1}}]}, "{'a': [{1…}]}"),
    ],
)
def test_values_are_reported_in_few_words(value: Any, said: str) -> None:
    assert brief(value) == said


def test_a_value_that_takes_for_ever_to_show_is_not_asked() -> None:
    class Endless:
        def __repr__(self) -> str:
            raise AssertionError("asked")

    assert brief([Endless(), {"key": Endless()}]) == "[<Endless>, {'key': <Endless>}]"
    assert len(brief({f"{number:0200}": Endless() for number in range(1000)})) <= 120


HOSTILE = '<script>alert(1)</script>"><img src=x onerror=alert(1)>&\x1b[2J'


def hostile_layers(count: int = 3) -> PlanLayers:
    return PlanLayers(
        LayerInfo(number, f"{HOSTILE}{number}", HOSTILE, 8, 8, number > 0, HOSTILE) for number in range(count)
    )


@pytest.mark.parametrize("made", [hostile_layers(), Report(hostile_layers(), hostile_layers(1), (), True)], ids=type)
def test_names_are_text_in_a_notebook(made: Any) -> None:
    assert "<script>" in read(made._repr_html_())  # as text: `read` takes no such element
    check(made)


def test_thousands_of_layers_are_folded() -> None:
    layers = hostile_layers(5000)
    assert "(4980 more)" in repr(layers) and "4976 more" in read(layers._repr_html_())
    check(layers, LayerMetrics(1, HOSTILE * 1000, HOSTILE * 1000, 5, 5), layers[0])


def test_layers_are_a_table_of_eighty_columns() -> None:
    with WrappedModel(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()) as wrapped:
        assert "detached" not in repr(wrapped)
        wrapped.plan(torch.ones(1, 4))
        assert repr(wrapped.layers).splitlines() == [
            "id  name  type    output  crosses  cut",
            " 0  0     Linear    16 B     16 B  yes",
            " 1  1     ReLU      16 B     16 B  yes",
        ]
        assert repr(wrapped.plan(torch.ones(1, 4))).startswith("Plan(2 layers, 0 to 1, digest ")
    assert "detached" in repr(wrapped)
    assert max(map(len, repr(hostile_layers(99)).splitlines())) <= 80
