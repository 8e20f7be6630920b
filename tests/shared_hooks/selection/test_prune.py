"""Channels cut out of the structure: nothing else changes, what is bound is refused by name, and files hold."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shared_hooks import WrappedModel
from shared_hooks.errors import CutRefused, SpecError
from shared_hooks.models import Table, spec_from_table
from shared_hooks.selection import Mask, Sample, capture, masked, pruned, read_selection, write_mask, write_pruned
from shared_hooks.selection.channels import trace
from shared_hooks.selection.prune import _nearly_equal, unmasked
from tests.shared_hooks.selection.networks import (
    Branching,
    ByName,
    Chain,
    Counting,
    FlatSum,
    Grouped,
    Residual,
    TiedWeights,
    image,
    samples,
    seeded,
)

KEEP = [1, 2, 6]


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_spaces_are_found() -> None:
    graph = trace(seeded(Residual()), samples(1)[0])
    stream = graph.space("stem")
    assert stream.makers == ["stem", "outer"] and stream.carriers == ["depth"] and not stream.pinned
    assert stream.readers == {"inner": 1, "head": 1} and stream.channels == 8
    assert graph.space("relu#2") == stream and graph.before("stem").makers == ["stem"]
    inner = graph.space("inner")
    assert (inner.makers, inner.carriers, inner.readers) == (["inner"], [], {"outer": 1})
    assert trace(seeded(Chain()), samples(1)[0]).space("second").readers == {"third": 4}


def test_a_pruned_chain_is_the_one_masked_with_the_means() -> None:
    """The reader has no border here, so that the means in its bias are exact."""
    model = seeded(Chain())
    captured = capture(model, "relu", samples())
    keep = [0, 3, 4, 5]
    fill = captured.fill.float()
    smaller = pruned(model, "relu", keep, samples())
    with torch.no_grad():
        for seed in range(3):
            close(smaller(image(seed)), masked(model, Mask("relu", 1, tuple(keep), tuple(fill.tolist())))(image(seed)))
            unmasked(model)
    assert smaller.first.weight.shape == (4, 3, 3, 3) and smaller.norm.num_features == 4  # type: ignore[union-attr]
    assert smaller.second.weight.shape == (6, 4, 3, 3)  # type: ignore[union-attr]


def test_channels_that_are_constant_are_not_missed_at_all() -> None:
    """A linear layer after flattening, several of its inputs for each channel."""
    model = seeded(Chain())
    with torch.no_grad():
        model.second.weight[[0, 3]] = 0  # type: ignore[index,union-attr]
        smaller = pruned(model, "second", [1, 2, 4, 5], samples())
        close(smaller(image(9)), model(image(9)))
        assert smaller.third.in_features == 16  # type: ignore[union-attr]


def test_a_residual_stream_is_cut_everywhere() -> None:
    model = seeded(Residual())
    gone = [channel for channel in range(8) if channel not in KEEP]
    with torch.no_grad():
        for module in (model.stem, model.depth, model.outer):
            module.weight[gone] = 0  # type: ignore[index,union-attr]
            module.bias[gone] = 0  # type: ignore[index,union-attr]
        smaller = pruned(model, "stem", KEEP, samples())
        close(smaller(image(9)), model(image(9)))
    assert smaller.depth.groups == 3 and smaller.head.in_features == 3  # type: ignore[union-attr]
    with WrappedModel(smaller) as wrapped:
        assert wrapped.verify(image()).ok


def test_the_model_given_is_left_alone() -> None:
    model = seeded(Residual())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pruned(model, "inner", [0], samples())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("model", "layer", "why"),
    [
        (Chain, "last", "the model's output"),
        (Grouped, "stem", r"grouped \(Conv2d\)"),
        (Grouped, "left", r"cat \(node cat\)"),
        (Branching, "first", "torch.fx cannot follow"),
    ],
)
def test_channel_constraints_are_named(model: type[nn.Module], layer: str, why: str) -> None:
    with pytest.raises(CutRefused, match=why):
        pruned(seeded(model()), layer, [0], samples())


@pytest.mark.parametrize(
    ("model", "layer", "args"),
    [
        (TiedWeights(), "before", (torch.randn(2, 6),)),
        (Counting(), "stem", (image(),)),
        (Counting(own=True), "stem", (image(),)),
    ],
    ids=["tied weights", "the number of channels", "the number of channels, a layer's"],
)
def test_dependencies_outside_the_graph_are_refused(model: nn.Module, layer: str, args: tuple[Tensor, ...]) -> None:
    with pytest.raises(CutRefused, match="computes something else"):
        pruned(seeded(model), layer, [0, 1, 2], [Sample(args)])


@pytest.mark.parametrize(
    ("whole", "made", "same"),
    [
        ([math.inf, 1.0], [math.inf, 1.0 + 1e-5], True),
        ([math.nan, 1.0], [math.nan, 1.0], True),
        ([math.inf, 1.0], [2.0, 1.0], False),
        ([2.0, 1.0], [math.inf, 1.0], False),
        ([math.nan, 1.0], [2.0, 1.0], False),
        ([0.0, 0.0], [1e-3, 0.0], False),
        ([0.0, 100.0], [1e-3, 100.0], True),
        ([1.0, 2j], [1.0 + 1e-5, 2j], True),
        ([1.0, 2j], [1.0, 1j], False),
        ([1, 2], [2, 1], True),
        ([1, 2], [1, 2, 3], False),
    ],
)
def test_answers_are_alike_but_for_rounding(whole: list[complex], made: list[complex], same: bool) -> None:
    assert _nearly_equal(torch.tensor(whole), torch.tensor(made)) is same


@pytest.mark.parametrize("keep", [[3], [0, 1]])
def test_channels_are_not_in_step_with_what_they_are_after_flattening(keep: list[int]) -> None:
    sample = Sample((torch.randn(2, 3, 2, 2), torch.randn(2, 5)))
    with pytest.raises(CutRefused, match="bound to add"):
        pruned(seeded(FlatSum()), "stem", keep, [sample])


def test_a_reader_called_by_keyword() -> None:
    model = seeded(ByName())
    smaller = pruned(model, "stem", KEEP, samples())
    with torch.no_grad():
        silent = torch.relu(model.stem(image()))  # type: ignore[operator]
        mean = torch.stack([torch.relu(model.stem(image(seed))).mean((0, 2, 3)) for seed in range(8)]).mean(0)  # type: ignore[operator]
        for channel in set(range(8)) - set(KEEP):
            silent[:, channel] = mean[channel]
        close(smaller(image()), model.head(silent))  # type: ignore[operator]


def test_training_mode_is_left_as_it_was() -> None:
    """Batch statistics and modes; dropout does not make the smaller model look wrong."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.Conv2d(8, 4, 1)).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    smaller = pruned(model, "0", KEEP, samples())
    capture(model, "1", samples())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(module.training for module in (*model.modules(), *smaller.modules()))


def test_wrong_words() -> None:
    model = seeded(Chain())
    for keep in ([], [2, 1], [1, 1], [-1], [8]):
        with pytest.raises(SpecError, match="channels 0 to 7"):
            pruned(model, "relu", keep, samples())
    with pytest.raises(SpecError, match="Did you mean relu"):
        pruned(model, "rellu", [0], samples())
    with pytest.raises(SpecError, match="runs 1 times"):
        pruned(model, "relu#2", [0], samples())
    with pytest.raises(SpecError, match="needs a calibration input"):
        pruned(model, "relu", [0], [])


# -- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pruned.safetensors"
    model = seeded(Residual())
    write_pruned(path, model, pruned(model, "stem", KEEP, samples()), "stem")
    return path


def test_a_file_makes_the_smaller_model_of_any_weights(file: Path) -> None:
    wanted = pruned(seeded(Residual()), "stem", KEEP, samples())
    made = read_selection(file).apply(seeded(Residual(), 5)).eval()
    with torch.no_grad():
        assert torch.equal(made(image()), wanted(image()))
    for name, module in made.named_modules():
        assert repr(module) == repr(wanted.get_submodule(name))


def test_a_spec_needs_no_weights_beside_it(file: Path) -> None:
    entries = {"id": "net", "factory": "tests.shared_hooks.selection.networks:Residual", "selection": file.name}
    spec = spec_from_table(Table({**entries, "weights": "absent.safetensors"}, "net.toml"), file.parent)
    assert spec.load_model().get_submodule("stem").weight.shape[0] == len(KEEP)  # type: ignore[index,union-attr]


def test_files_that_do_not_fit_are_refused(file: Path) -> None:
    with pytest.raises(SpecError, match="another structure"):
        read_selection(file).apply(seeded(Chain()))
    tensors, about = load_file(file), dict(read_selection(file).about)

    def forge(more: dict[str, object], without: str = "", **changed: Tensor) -> None:
        kept = {name: tensor for name, tensor in tensors.items() if name != without}
        save_file({**kept, **changed}, file, metadata={"isthmus": json.dumps(about | more)})
        with pytest.raises(SpecError, match=r"pruned\.safetensors"):
            read_selection(file).apply(seeded(Residual()))

    forge({"sizes": None})
    forge({"sizes": {"stem": 3}})
    forge({"sizes": {"absent": {"out_channels": 3}}})
    forge({"sizes": {"stem": {"forward": 3}}})
    forge({"sizes": {"stem": {"out_channels": "3"}}})
    forge({"sizes": {"depth": {"groups": 0}}})
    forge({"sizes": {"stem": {"out_channels": -1}}})
    forge({}, without="stem.weight")
    forge({}, **{"stem.weight": torch.zeros(2, 3, 3, 3)})
    forge({}, extra=torch.zeros(1))


def test_a_mask_is_no_pruned_model(tmp_path: Path) -> None:
    write_mask(tmp_path / "m.safetensors", seeded(Chain()), Mask("relu", 1, (0,), (0.0,) * 8))
    assert read_selection(tmp_path / "m.safetensors").is_mask
