"""Parameters left in their files: the same values, loaded when asked for, given back."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from shared_hooks.errors import SpecError
from shared_hooks.models import load_spec
from shared_hooks.models.weights import MappedWeights, load_weights, unfilled
from shared_hooks.modules import weights_hash


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.rnn = nn.LSTM(4, 4)
        self.linear = nn.Linear(4, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps, _ = self.rnn(self.norm(self.conv(x)).flatten(2).mean(-1)[:, None])
        out: torch.Tensor = self.linear(steps)
        return out


def written(path: Path, model: nn.Module, **others: torch.Tensor) -> Path:
    save_file({name: value.contiguous() for name, value in (model.state_dict() | others).items()}, path)
    return path


def mapped(file: Path, make: Any = Net) -> tuple[Any, MappedWeights]:
    model: Any = unfilled(make)
    weights = MappedWeights(model, [file], "here")
    return model.eval(), weights


def resident(file: Path) -> int:
    """Bytes of the file's mappings that are in this process's memory."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line[:1] in "0123456789abcdef" and "-" in line.split()[0]:
            ours = line.endswith(str(file))
        elif ours and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def test_the_same_model(tmp_path: Path) -> None:
    file = written(tmp_path / "w.safetensors", Net())
    whole = Net().eval()
    load_weights(whole, [file], "here")
    model, weights = mapped(file)
    assert weights.loaded == 0 and weights.total == sum(one.nbytes for one in whole.parameters())
    assert weights_hash(model) == weights_hash(whole)
    weights.release()
    assert resident(file) == 0
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(model(x), whole(x)), "what was given back is read again"
    weights.load(model.parameters())
    assert weights.loaded == weights.total and all(one.data_ptr() % 64 == 0 for one in model.parameters())
    weights.release()
    assert weights_hash(model) == weights_hash(whole)
    with torch.no_grad():
        assert torch.equal(model(x), whole(x))


def test_weights_that_cannot_be_mapped_are_loaded(tmp_path: Path) -> None:
    """Another type in the file, or a module that makes something of its own of what it loads."""

    class Doubled(nn.Linear):
        def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
            super()._load_from_state_dict({name: 2 * value for name, value in state.items()}, prefix, *more)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.own = nn.Linear(4, 4, bias=False), Doubled(4, 4, bias=False)

    values = {"low.weight": torch.ones(4, 4, dtype=torch.float16), "own.weight": torch.ones(4, 4)}
    save_file(values, tmp_path / "w.safetensors")
    model, weights = mapped(tmp_path / "w.safetensors", Two)
    assert weights.loaded == weights.total
    assert model.low.weight.dtype == torch.float32 and model.low.weight.sum() == 16 and model.own.weight.sum() == 32


def test_types_and_layouts(tmp_path: Path) -> None:
    """Small floats stay in the file; a layout that the file does not have is made in memory."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tiny = nn.Parameter(torch.ones(8).to(torch.float8_e4m3fn), requires_grad=False)
            self.flags = nn.Parameter(torch.ones(3, dtype=torch.bool), requires_grad=False)
            self.none = nn.Parameter(torch.empty(0, 4))
            self.conv = nn.Conv2d(8, 8, 1).to(memory_format=torch.channels_last)

    file = written(tmp_path / "w.safetensors", Odd())
    whole = Odd()
    load_weights(whole, [file], "here")
    model, weights = mapped(file, Odd)
    assert weights_hash(model) == weights_hash(whole)
    assert model.conv.weight.stride() == whole.conv.weight.stride()
    assert not weights.is_loaded(model.tiny) and weights.is_loaded(model.conv.weight)


def test_tied_weights_are_one(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight

    save_file({"head.weight": torch.ones(8, 4)}, tmp_path / "w.safetensors")
    model, weights = mapped(tmp_path / "w.safetensors", Tied)
    weights.load([model.head.weight])
    assert model.embed.weight is model.head.weight and weights.loaded == weights.total == 128


class Two(nn.Module):
    """``tie`` makes the second share the first's memory, without being the same parameter."""

    def __init__(self, tie: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        if tie == "data":
            self.b.weight.data = self.a.weight.data
        elif tie == "parameter":
            self.b.weight = nn.Parameter(self.a.weight)
        elif tie == "detached":
            self.b.weight = nn.Parameter(self.a.weight.detach())
        elif tie == "turned":
            self.b.weight = nn.Parameter(self.a.weight.t())
        elif tie == "part":
            self.b.weight = nn.Parameter(self.a.weight[1:3])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.a(x))
        return out


@pytest.mark.parametrize("odd", [False, True], ids=["", "odd"])
@pytest.mark.parametrize("names", ["ab", "a", "b"])
@pytest.mark.parametrize("tie", ["data", "parameter", "detached", "turned", "part", "none"])
def test_parameters_that_share_memory(tmp_path: Path, tie: str, names: str, odd: bool) -> None:
    """Whichever names a file has, of values that are true for one of them alone: as `load_weights` gives them."""

    def make() -> Two:
        made = Two(tie)
        if odd:  # loaded by code of its own
            made.b._register_load_state_dict_pre_hook(lambda *args: None)
        return made

    values = {f"{name}.weight": torch.randn(make().get_parameter(f"{name}.weight").shape) for name in names}
    save_file(values, tmp_path / "w.safetensors")
    whole = make()
    try:
        load_weights(whole, [tmp_path / "w.safetensors"], "here")
    except SpecError as error:
        with pytest.raises(SpecError, match=re.escape(str(error))):
            mapped(tmp_path / "w.safetensors", make)
        return
    model, weights = mapped(tmp_path / "w.safetensors", make)
    x = torch.randn(3, 4)
    for load in ([], [model.b.weight], model.parameters()):
        weights.load(load)
        for name in ("a.weight", "b.weight"):
            assert torch.equal(model.get_parameter(name), whole.get_parameter(name))
        if tie != "part":
            assert torch.equal(model(x), whole(x))
    assert weights.loaded == weights.total


def test_a_parameter_that_no_file_has_a_value_for_is_refused(tmp_path: Path) -> None:
    """One that its module keeps out of the state dictionary: an ordinary build leaves it what it was made."""

    class Hidden(nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            destination[prefix + "weight"] = self.weight

    save_file({"weight": torch.ones(4, 4)}, tmp_path / "w.safetensors")
    with pytest.raises(SpecError, match="here: bias cannot be left in a file: none has a value under its name"):
        mapped(tmp_path / "w.safetensors", lambda: Hidden(4, 4))


@pytest.mark.parametrize("in_place", [True, False], ids=["written over", "replaced"])
def test_a_file_that_changes(tmp_path: Path, in_place: bool) -> None:
    file = written(tmp_path / "w.safetensors", Net())
    model, weights = mapped(file)
    before = weights_hash(model)
    weights.check()
    if in_place:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        os.utime(file, ns=(1, 1))
        with pytest.raises(SpecError, match=r"w\.safetensors was changed while .* replace files by mv"):
            weights.check()
    else:
        os.replace(written(tmp_path / "new", Net()), file)
        weights.check()
        weights.release()
        assert weights_hash(model) == before
        file.unlink()
        weights.check()


def test_a_pickle_is_refused_as_ever(tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(SpecError, match=r"here: .*w\.pt is read whole, only safetensors files can stay on disk"):
        mapped(tmp_path / "w.pt")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what is mapped is read from /proc")
@pytest.mark.parametrize("tied", [False, True])
def test_a_file_that_is_written_to_changes_no_model(tmp_path: Path, tied: bool) -> None:
    """`from_pretrained` leaves the CPU's weights in the mapped file: they are copied."""
    options = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**options, vocab_size=99, tie_word_embeddings=tied)
    for seed, name in enumerate(("used", "other")):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(tmp_path / name)
    used = tmp_path / "used" / "model.safetensors"
    spec = tmp_path / "llm.toml"
    spec.write_text(
        'id = "llm"\nfactory = "transformers:LlamaForCausalLM.from_pretrained"\n'
        f'[factory_kwargs]\npretrained_model_name_or_path = "{tmp_path / "used"}"\n'
    )
    model: Any = load_spec(spec).load_model()
    assert resident(used) == 0
    before = weights_hash(model)
    used.write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())  # in place
    assert weights_hash(model) == before
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert weights_hash(load_spec(spec).load_model()) != before
    used.write_bytes(b"")
    model(torch.tensor([[1, 2, 3]]))
