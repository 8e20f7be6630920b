"""ONNX files: every node tagged and by which rule, numbers as torch's, head and tail as the whole."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shared_hooks import WrappedModel
from shared_hooks.errors import CutRefused
from shared_hooks.mapping import HierarchyMap, map_of, onnx_export, onnx_halves
from shared_hooks.mapping.onnx_export import RULES, Exported, export, sidecar, sidecar_path, tag_nodes, write
from shared_hooks.mapping.onnx_halves import Halves, halve, tags_of_half
from shared_hooks.modules.attach import Shim
from shared_hooks.planning.plan import LayerInfo, Plan
from tests.shared_hooks.mapping import networks

onnx = pytest.importorskip("onnx")
Maker = Callable[[], tuple[nn.Module, networks.Call]]


class Written:
    """A model's ONNX file and what it was made of."""

    def __init__(self, make: Maker, folder: Path) -> None:
        self.model, (self.args, self.kwargs) = make()
        with WrappedModel(self.model) as wrapped:
            self.plan: Plan = wrapped.plan(*self.args, **self.kwargs)
        self.known: HierarchyMap = map_of(self.model, self.plan)
        self.exported: Exported = export(self.model, self.plan, self.args, self.kwargs)
        self.tags = tag_nodes(self.exported.model, self.exported.labels, self.known)
        self.file = folder / "whole.onnx"
        write(self.exported.model, sidecar(self.exported.model, self.tags, self.known), self.file)
        self.wanted = onnx_halves.expected(self.model, self.args, self.kwargs)

    def halves(self, at: LayerInfo, folder: Path) -> tuple[Halves, Path, Path]:
        halves = halve(self.exported.model, at, self.known, {})
        for half, file in ((halves.head, "head.onnx"), (halves.tail, "tail.onnx")):
            write(half, sidecar(half, tags_of_half(half, self.tags), self.known), folder / file)
        return halves, folder / "head.onnx", folder / "tail.onnx"


Get = Callable[[Maker], Written]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """Each model is exported once: that is what takes time."""
    return functools.cache(lambda make: Written(make, tmp_path_factory.mktemp("whole")))


def assert_all_ok(checks: list[onnx_halves.HalvesCheck]) -> None:
    assert all(check.ok for check in checks), [check for check in checks if not check.ok]


@pytest.mark.parametrize("make", [networks.bert, networks.gpt2, networks.vit, networks.resnet, networks.awkward])
def test_all_nodes_are_tagged_and_head_and_tail_are_the_whole(make: Maker, written: Get, tmp_path: Path) -> None:
    made = written(make)
    assert [layer.name for layer in made.plan.layers] == list(made.exported.layers)
    checks = onnx_halves.check_file(made.file, made.known)
    assert [check.what for check in checks] == ["well formed", "every node tagged", "tags in the map", "sidecar"]
    assert_all_ok(checks)
    assert_all_ok([onnx_halves.check_run(made.file, made.exported.tensors, made.wanted)])
    # most nodes know their call; a rule of last resort must not hide that they do not
    rules = [tag.rule for tag in made.tags.values()]
    assert rules.count("scope") >= 0.9 * len(rules)
    cuts = [layer.layer_id for layer in made.plan.layers if layer.can_split]
    assert len(cuts) > 8
    for layer_id in sorted({cuts[0], *cuts[:: len(cuts) // 5], cuts[-1]}):
        halves, head, tail = made.halves(made.plan.layers[layer_id], tmp_path)
        assert_all_ok([*onnx_halves.check_file(head, made.known), *onnx_halves.check_file(tail, made.known)])
        chain = onnx_halves.check_chain(head, tail, made.file, made.exported.tensors, made.wanted)
        assert_all_ok(chain)
        assert len(chain) == 3
        # the head has nothing that ran after the cut, the tail nothing before it that depends on the inputs
        last = {node.metadata_props["isthmus.layers_done"] for node in halves.head.graph}
        assert max(map(int, last)) <= layer_id


@pytest.mark.parametrize("make", [networks.bert, networks.gpt2, networks.vit, networks.resnet, networks.awkward])
def test_a_blocks_end_is_a_cut_that_sends_what_the_engine_sends(make: Maker, written: Get, tmp_path: Path) -> None:
    made = written(make)
    blocks = [block for block in made.plan.blocks if block.can_split]
    for block in blocks[:: max(1, len(blocks) // 4)]:
        halves, head, tail = made.halves(block, tmp_path)
        assert sum(one.nbytes for one in halves.crossing) == block.frontier_bytes, block.name
        assert_all_ok([*onnx_halves.check_file(head, made.known), *onnx_halves.check_file(tail, made.known)])
        assert_all_ok(onnx_halves.check_chain(head, tail, made.file, made.exported.tensors, made.wanted))


def test_a_call_differs_from_another_call_of_the_same_module(written: Get) -> None:
    made = written(networks.awkward)
    calls = [tag.call for tag in made.tags.values() if tag.operation.startswith("aten.linear")]
    assert dict.fromkeys(calls) == dict.fromkeys(
        ["first.layer", "first.layer#2", "first.layer#3", "heads.a/b", "heads.c"]
    )
    added = [tag.tag for tag in made.tags.values() if tag.operation.startswith("aten.add")]
    assert added == ["/Awkward/Block.first", "/Awkward/Block.first#2", "/Awkward/Block.second"]
    side = json.loads(sidecar_path(made.file).read_text())
    assert side["inputs"] == ["x", "scale"] and side["outputs"] == ["heads.0", "heads.1", "output.scale"]
    assert "first.same" in side["calls_without_node"]  # nn.Identity computes nothing
    assert sum(side["rules"].values()) == len(side["nodes"]) and tuple(side["rules"]) == RULES
    assert not any(isinstance(module.__dict__.get("forward"), Shim) for module in made.model.modules())
    graph = onnx.load(str(made.file)).graph
    assert {node.name for node in graph.node} == {node["name"] for node in side["nodes"]}
    # weights have the model's own names; those that are only read as constants (transposed, say) have none
    assert "heads.c.bias" in {one.name for one in graph.initializer}
    assert not any(one.name.startswith("model.") for one in graph.initializer)


def test_the_cut_sends_what_the_engine_sends(written: Get) -> None:
    made = written(networks.resnet)
    for layer in made.plan.layers:
        halves = halve(made.exported.model, layer, made.known, {})
        assert sum(one.nbytes for one in halves.crossing) == layer.frontier_bytes, layer.name


def test_nodes_without_a_label_are_tagged_by_the_next_rule(written: Get) -> None:
    made = written(networks.awkward)
    nodes = list(made.tags)
    adds = [node for node, tag in made.tags.items() if tag.operation.startswith("aten.add")]
    # unknown calls: the nearest module above that is known
    labels = {node: replace(label, call=f"{label.call.partition('#')[0]}.gone") for node, label in labels_of(made)}
    found = tag_nodes(made.exported.model, labels, made.known)
    assert {found[node].rule for node in labels if made.tags[node].call != "(model)"} == {"parent"}
    # no label: what reads it, here the layer of the next call of the block
    labels = {node: label for node, label in labels_of(made) if node is not adds[0]}
    found = tag_nodes(made.exported.model, labels, made.known)
    assert found[adds[0]].rule == "operation" and found[adds[0]].call == "first#2"
    # nothing known at all: the model
    found = tag_nodes(made.exported.model, {}, made.known)
    assert {(found[node].rule, found[node].call) for node in nodes} == {("root", "(model)")}
    assert len(found) == len(nodes)
    assert tag_nodes(made.exported.model, made.exported.labels, made.known) == made.tags  # as it was


def labels_of(made: Written) -> list[tuple[Any, Any]]:
    return [(node, label) for node, label in made.exported.labels.items() if node in made.tags]


@pytest.mark.parametrize("damage", ["tag", "unknown tag", "rule", "numbers", "sidecar", "bytes", "outputs"])
def test_validation_finds_damage(damage: str, tmp_path: Path, digits: Written) -> None:
    file = tmp_path / "damaged.onnx"
    read = onnx.load(str(digits.file))
    node = read.graph.node[3]
    tag = next(entry for entry in node.metadata_props if entry.key == "isthmus.tag")
    if damage == "tag":
        node.metadata_props.remove(tag)
    elif damage == "unknown tag":
        tag.value = "/Nobody"
    elif damage == "rule":
        next(entry for entry in node.metadata_props if entry.key == "isthmus.rule").value = "guess"
    elif damage == "numbers":
        weights = next(one for one in read.graph.initializer if one.name == "classifier.weight")
        weights.raw_data = bytes(len(weights.raw_data))
    elif damage == "outputs":
        read.graph.output.add().CopyFrom(read.graph.input[0])
    onnx.save(read, str(file))
    sidecar_path(file).write_text("{}" if damage == "sidecar" else sidecar_path(digits.file).read_text())
    if damage == "bytes":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    checks = onnx_halves.check_file(file, digits.known)
    checks.append(onnx_halves.check_run(file, digits.exported.tensors, digits.wanted))
    assert not all(check.ok for check in checks)


@pytest.fixture(scope="module")
def digits(written: Get) -> Written:
    return written(networks.digits)


def test_the_undamaged_file_is_found_well(digits: Written) -> None:
    assert_all_ok(onnx_halves.check_file(digits.file, digits.known))
    assert_all_ok([onnx_halves.check_run(digits.file, digits.exported.tensors, digits.wanted)])


def test_large_weights_lie_beside_the_file(digits: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_export, "LARGE", 1000)
    for _ in range(2):  # over what is there already, too
        halves, head, tail = digits.halves(digits.plan.layers[20], tmp_path)
    assert len(halves.crossing) == 2
    assert (tmp_path / "head.onnx.data").stat().st_size > 1000
    assert_all_ok([*onnx_halves.check_file(head, digits.known), *onnx_halves.check_file(tail, digits.known)])
    assert_all_ok(onnx_halves.check_chain(head, tail, digits.file, digits.exported.tensors, digits.wanted))


def test_differences_are_measured_against_the_magnitude() -> None:
    def ok(given: list[float], wanted: list[float]) -> bool:
        return onnx_halves._compared("same", [torch.tensor(given)], [torch.tensor(wanted)]).ok

    assert ok([1.0, float("nan"), float("inf")], [1.0, float("nan"), float("inf")])
    assert ok([1e6 + 1], [1e6]) and not ok([1.001], [1.0])
    assert not ok([float("nan")], [1.0]) and not ok([float("inf")], [1.0]) and not ok([1.0, 2.0], [1.0])


def test_a_model_that_reads_its_data_is_refused_by_name() -> None:
    model = networks.Doubtful().eval()
    with WrappedModel(model) as wrapped:
        plan = wrapped.plan(torch.ones(1, 4))
    with pytest.raises(onnx_export.ExportFailed, match="torch cannot export this model to ONNX"):
        export(model, plan, (torch.ones(1, 4),), {})
    assert not any(isinstance(module.__dict__.get("forward"), Shim) for module in model.modules())


def test_a_cut_with_an_empty_head_is_refused(tmp_path: Path) -> None:
    class Late(nn.Module):
        """Its first layer works on a constant."""

        def __init__(self) -> None:
            super().__init__()
            self.constant = nn.Linear(2, 2)
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            offset = self.constant(torch.ones(1, 2))
            out: torch.Tensor = self.layer(x) + offset
            return out

    made = Written(lambda: (Late().eval(), ((torch.randn(1, 2),), {})), tmp_path)
    with pytest.raises(CutRefused, match="after constant: .*the head would be empty"):
        halve(made.exported.model, made.plan.layers[0], made.known, {})


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_export, "find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(onnx_export.SpecError, match=r'onnxscript missing: pip install "isthmus\[onnx\]"'):
        onnx_export.check()
