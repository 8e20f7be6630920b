"""A masked model: its channels are right, every cut of it is exact, what crosses is what was kept, and files hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from shared_hooks import WrappedModel
from shared_hooks.errors import SpecError
from shared_hooks.models import ModelSpec, Table, load_spec, spec_from_table
from shared_hooks.selection import Mask, masked, read_selection, write_mask
from shared_hooks.selection.prune import Restore, Select, unmasked
from tests.shared_hooks.selection.networks import Chain, Residual, Tokens, image, seeded

KEEP = (0, 2, 3, 7)
FILL = tuple(0.125 * channel for channel in range(8))
MASK = Mask("relu", 1, KEEP, FILL)


@given(st.integers(1, 6), st.integers(0, 2), st.data())
def test_kept_channels_return_and_the_others_are_their_means(channels: int, rank: int, data: st.DataObject) -> None:
    keep = sorted(data.draw(st.sets(st.integers(0, channels - 1), min_size=1)))
    dim = data.draw(st.sampled_from([1, -1]))
    shape = [2, channels, *[3] * rank] if dim == 1 else [2, *[3] * rank, channels]
    values, fill = torch.randn(shape), torch.randn(channels)
    sent = Select(keep, channels, dim)(values)
    assert sent.shape[dim] == len(keep) and sent.is_contiguous()
    back = Restore(keep, fill, dim)(sent).movedim(dim, 1)
    for channel in range(channels):
        wanted = values.movedim(dim, 1)[:, channel] if channel in keep else fill[channel].expand_as(back[:, channel])
        assert torch.equal(back[:, channel], wanted)


def test_every_cut_of_a_masked_model_is_exact_and_half_crosses() -> None:
    model = masked(seeded(Chain()), MASK)
    with WrappedModel(model) as wrapped:
        assert wrapped.verify(image()).ok
        frontiers = {layer.name: layer.frontier_bytes for layer in wrapped.layers}
    # what the mask reads is all that crosses before it
    assert frontiers["relu.inner"] == 4 * 16 * 16 * 4
    assert frontiers["relu.select"] == 4 * 16 * 16 * 4
    assert frontiers["relu.restore"] == 8 * 16 * 16 * 4


def test_a_mask_of_everything_changes_nothing_and_masks_come_off() -> None:
    model, whole = seeded(Chain()), seeded(Chain())
    names = [name for name, _ in model.named_modules()]
    with torch.no_grad():
        full = masked(model, Mask("norm", 1, tuple(range(8)), FILL))
        assert torch.equal(full(image()), whole(image()))
        assert full.norm.num_features == 8  # type: ignore[union-attr]  # a masked module's attributes are its own
        assert [name for name, _ in unmasked(model).named_modules()] == names
        assert torch.equal(model(image()), whole(image()))


def test_tokens_and_shared_modules() -> None:
    tokens = masked(seeded(Tokens()), Mask("embed", -1, KEEP, FILL))
    with WrappedModel(tokens) as wrapped:
        x = torch.randn(1, 5, 6)
        assert wrapped.verify(x).ok
        assert next(one for one in wrapped.layers if one.name == "embed.select").frontier_bytes == 5 * 4 * 4

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(6, 8)
            self.two = self.one

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.two(x)
            return out

    twice = masked(Twice(), Mask("one", -1, KEEP, FILL))
    with torch.no_grad():
        assert torch.equal(twice(torch.randn(2, 6))[:, 1], torch.full((2,), FILL[1]))


@pytest.mark.parametrize(
    ("keep", "fill"), [((), FILL), ((1, 0), FILL), ((1, 1), FILL), ((-1,), FILL), ((8,), FILL), ((0,), (float("nan"),))]
)
def test_no_mask(keep: tuple[int, ...], fill: tuple[float, ...]) -> None:
    with pytest.raises(SpecError):
        Mask("relu", 1, keep, fill)


def test_a_mask_that_does_not_fit() -> None:
    with pytest.raises(SpecError, match="Did you mean relu"):
        masked(seeded(Chain()), Mask("reluu", 1, KEEP, FILL))
    with pytest.raises(SpecError, match="which the model does not have"):
        masked(seeded(Chain()), Mask("", 1, KEEP, FILL))
    with pytest.raises(SpecError, match="8 channels, the layer has 6"):
        masked(seeded(Chain()), Mask("second", 1, KEEP, FILL))(image())


# -- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mask.safetensors"
    write_mask(path, seeded(Chain()), MASK, "relu")
    return path


def spec_of(tmp_path: Path, factory: str = "tests.shared_hooks.selection.networks:Chain", **more: str) -> ModelSpec:
    table = Table({"id": "net", "factory": factory, "seed": 3, **more}, "net.toml")
    return spec_from_table(table, tmp_path)


def test_a_file_makes_the_same_model(file: Path) -> None:
    selection = read_selection(file)
    assert selection.is_mask and selection.mask == MASK
    with torch.no_grad():
        assert torch.equal(selection.apply(seeded(Chain()))(image()), masked(seeded(Chain()), MASK)(image()))
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_spec_names_a_file(tmp_path: Path) -> None:
    write_mask(tmp_path / "mask.safetensors", spec_of(tmp_path).load_model(), MASK)
    model = spec_of(tmp_path, selection="mask.safetensors").load_model()
    assert "relu.select" in dict(model.named_modules())
    assert not any(module.training for module in model.modules())
    assert load_spec("digits", selection="x.safetensors").selection == Path("x.safetensors")
    with pytest.raises(SpecError, match="no such selection file"):
        spec_of(tmp_path, selection="absent.safetensors").load_model()


def test_a_file_for_another_model_is_refused(file: Path) -> None:
    with pytest.raises(SpecError, match="mask.safetensors: it was made for a model with other weights"):
        read_selection(file).apply(seeded(Chain(), 1))
    with pytest.raises(SpecError, match="mask.safetensors: it was made for a model of another structure"):
        read_selection(file).apply(seeded(Residual()))
    with pytest.raises(SpecError, match="another structure"):
        read_selection(file).apply(masked(seeded(Chain()), MASK))


def altered(file: Path, tensors: dict[str, torch.Tensor] | None = None, **about: object) -> Path:
    known = dict(read_selection(file).about) | about
    save_file({**load_file(file), **(tensors or {})}, file, metadata={"isthmus": json.dumps(known)})
    return file


@pytest.mark.parametrize(
    "about",
    [
        *({"format": "x"}, {"version": 2}, {"kind": "code"}, {"structure": None}, {"weights": 1}),
        *({"dim": 0}, {"dim": "1"}, {"module": 3}, {"module": "absent"}),
    ],
    ids=str,
)
def test_a_forged_description_is_refused(about: dict[str, object], file: Path) -> None:
    with pytest.raises(SpecError, match="mask.safetensors"):
        read_selection(altered(file, **about)).apply(seeded(Chain()))


@pytest.mark.parametrize(
    "tensors",
    [
        {"keep": torch.tensor([0, 99])},
        {"keep": torch.tensor([3, 1])},
        {"keep": torch.tensor([], dtype=torch.int64)},
        {"keep": torch.tensor([0.0])},
        {"keep": torch.tensor([[0]])},
        {"fill": torch.tensor([torch.nan])},
        {"fill": torch.zeros(2, 4)},
    ],
    ids=str,
)
def test_forged_tensors_are_refused(tensors: dict[str, torch.Tensor], file: Path) -> None:
    with pytest.raises(SpecError, match="mask.safetensors"):
        read_selection(altered(file, tensors)).apply(seeded(Chain()))


def test_damaged_files_are_refused(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    for cut in (0, 7, 40, len(whole) - 1):
        file.write_bytes(whole[:cut])
        with pytest.raises(SpecError, match="mask.safetensors"):
            read_selection(file)
    other = tmp_path / "weights.safetensors"
    save_file({"weight": torch.zeros(2)}, other)
    with pytest.raises(SpecError, match="not a file of edge-client prune"):
        read_selection(other)
    with pytest.raises(SpecError, match="cannot be written"):
        write_mask(tmp_path / "absent" / "mask.safetensors", seeded(Chain()), MASK)
