"""The map: tags of classes alone, what ran joined with what is there, the coverage of one by the other."""

from __future__ import annotations

import json
from pathlib import Path

import networkx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shared_hooks import WrappedModel
from shared_hooks.errors import SpecError
from shared_hooks.mapping import HierarchyMap, coverage_of, map_of, tags_of
from shared_hooks.mapping.map_file import to_json, write_graphml
from shared_hooks.modules.tables import walk
from tests.shared_hooks.mapping import networks
from tests.shared_hooks.mapping.networks import Call
from tests.zoo import CASES


def mapped(model: nn.Module, call: Call, depth: int | None = None) -> HierarchyMap:
    args, kwargs = call
    with WrappedModel(model, depth) as wrapped:
        return map_of(model, wrapped.plan(*args, **kwargs))


def test_tags_of_bert_are_class_names_with_an_index_where_modules_are_listed() -> None:
    model, call = networks.bert()
    known = mapped(model, call)
    assert known.by_path["encoder.layer.0.attention"].tag == "/BertModel/BertEncoder/BertLayer.0/BertAttention"
    query = known.by_path["encoder.layer.1.attention.self.query"].tag
    assert query == "/BertModel/BertEncoder/BertLayer.1/BertAttention/BertSelfAttention/Linear.query"
    assert known.by_path["encoder.layer"].holder and known.by_path["encoder.layer"].calls == 0
    # the list is no call, so a layer called by the encoder is where it belongs
    assert coverage_of(known).from_elsewhere == ()


def test_awkward_modules_have_tags_of_their_own() -> None:
    model, call = networks.awkward()
    known = mapped(model, call)
    tags = {entry.path: entry.tag for entry in known.modules}
    assert tags["first"] == "/Awkward/Block.first" and tags["second"] == "/Awkward/Block.second"
    assert tags["unused"] == "/Awkward/Linear.unused"
    assert tags["rows.0.0"] == "/Awkward/ReLU.0"
    # the second of the first list and the only one of the second list are distinguished, and from nobody else
    assert (tags["rows.0.1"], tags["rows.1.0"]) == ("/Awkward/Tanh.1", "/Awkward/Tanh.0")
    assert tags["heads.a/b"] == "/Awkward/Linear.a%2Fb"
    assert known.by_path["first.layer"].names == ("second.layer",)
    assert known.by_call["first.layer#3"].tag == "/Awkward/Block.first/Linear#3"
    assert len(set(tags.values())) == len(tags)


def test_equal_short_tags_become_full_ones() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.ModuleList([nn.Linear(2, 2)])
            self.right = nn.ModuleList([nn.Linear(2, 2)])

    tags = tags_of(walk(Two(), None))
    assert (tags["left.0"], tags["right.0"]) == ("/Two/Linear.left.0", "/Two/Linear.right.0")


def trees() -> st.SearchStrategy[nn.Module]:
    leaves = st.sampled_from([nn.ReLU, nn.Tanh, nn.Identity]).map(lambda kind: kind())

    def holders(inner: st.SearchStrategy[nn.Module]) -> st.SearchStrategy[nn.Module]:
        names = st.dictionaries(st.sampled_from(["0", "1", "a", "b", "a/b", "%"]), inner, max_size=4)
        rows = st.lists(inner, max_size=3)
        return rows.map(nn.ModuleList) | rows.map(lambda some: nn.Sequential(*some)) | names.map(nn.ModuleDict)

    return st.recursive(leaves, holders, max_leaves=12)


@given(trees())
def test_no_two_modules_have_the_same_tag(model: nn.Module) -> None:
    modules = walk(model, None)
    tags = tags_of(modules)
    assert set(tags) == {info.path for info in modules.values()}
    assert len(set(tags.values())) == len(tags)


def test_the_map_joins_modules_calls_and_operations() -> None:
    model, call = networks.awkward()
    known = mapped(model, call)
    assert known.modules[0].path == "(model)"
    calls = [entry.name for entry in known.calls]
    assert calls[:4] == ["(model)", "first", "first.layer", "first.same"]
    assert [entry.name for entry in known.chain("first.layer#3")] == ["(model)", "second", "first.layer#3"]
    assert [entry.call for entry in known.operations if entry.name == "add"] == ["first", "first#2", "second"]
    orders = [entry.order for entry in (*known.calls, *known.operations)]
    assert sorted(orders) == list(range(len(orders)))
    layers = [entry.layer_id for entry in known.calls if entry.layer_id is not None]
    assert layers == list(range(len(layers)))


def test_coverage_says_what_is_only_static_only_dynamic_and_repeated() -> None:
    model, call = networks.awkward()
    report = coverage_of(mapped(model, call))
    assert report.unused == ("unused", "rows.0.0")
    assert report.holders == ("rows", "rows.0", "rows.1", "heads")
    assert dict(report.functional) == {"add": 3, "mul": 1}
    assert dict(report.repeated) == {"first": 2, "first.layer": 3, "first.same": 2}
    assert report.from_elsewhere == ("first.layer#3",)  # the second block calls the first one's layer
    assert report.modules == len(report.both) + len(report.unused) + len(report.holders)


def test_depth_limits_the_map() -> None:
    model, call = networks.awkward()
    known = mapped(model, call, depth=1)
    assert {entry.path.count(".") for entry in known.modules} == {0}
    assert [entry.name for entry in known.calls if entry.layer_id is not None][:2] == ["first", "first#2"]


@pytest.mark.parametrize("case", CASES[::6], ids=lambda case: case.name)
def test_every_model_of_the_zoo_has_a_map(case: networks.Any) -> None:
    with case.setting():
        known = mapped(case.build(), case.inputs())
    assert len({entry.tag for entry in known.modules}) == len(known.modules)
    assert len(known.by_call) == len(known.calls)
    report = coverage_of(known)
    assert report.modules == len(report.both) + len(report.unused) + len(report.holders)
    json.dumps(to_json(known), allow_nan=False)


def test_graphml_holds_what_the_json_holds(tmp_path: Path) -> None:
    model, call = networks.awkward()
    known = mapped(model, call)
    write_graphml(known, str(tmp_path / "map.graphml"))
    graph = networkx.read_graphml(tmp_path / "map.graphml")
    kinds = [data["kind"] for _, data in graph.nodes(data=True)]
    assert kinds.count("module") == len(known.modules)
    assert kinds.count("call") == len(known.calls)
    assert kinds.count("operation") == len(known.operations)
    assert graph.nodes["module:heads.a/b"]["tag"] == "/Awkward/Linear.a%2Fb"
    assert graph.edges["module:first", "module:first.layer"]["kind"] == "holds"
    assert graph.edges["module:first.layer", "call:first.layer#3"]["kind"] == "runs"
    assert graph.edges["call:second", "call:first.layer#3"]["kind"] == "makes"


def test_graphml_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    known = mapped(nn.Linear(2, 2), ((torch.ones(1, 2),), {}))
    with pytest.raises(SpecError, match="graphml: .* cannot be written"):
        write_graphml(known, str(tmp_path / "none" / "map.graphml"))
