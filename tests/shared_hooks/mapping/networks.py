"""Models for maps and exports: small, random weights, the same in every process."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from shared_hooks.models import load_spec

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Block(nn.Module):
    """A layer that may be another block's, too, and a residual connection."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.same = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.same(self.layer(x) + x)
        return out


class Awkward(nn.Module):
    """A shared layer, a block called twice, lists in lists, modules that never run, an input in the output."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(4, 4)
        self.first = Block(shared)
        self.second = Block(shared)
        self.unused = nn.Linear(4, 2)
        self.rows = nn.ModuleList([nn.ModuleList([nn.ReLU(), nn.Tanh()]), nn.ModuleList([nn.Tanh()])])
        self.heads = nn.ModuleDict({"a/b": nn.Linear(4, 2), "c": nn.Linear(4, 3)})

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Any]:
        x = self.second(self.first(self.first(x)))
        x = self.rows[1][0](self.rows[0][1](x)) * scale  # type: ignore[index]
        return {"heads": [head(x) for head in self.heads.values()], "scale": scale, "classes": 5}


class Doubtful(nn.Module):
    """Its path hangs on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out * 2 if out.sum().item() > 0 else out


def awkward() -> tuple[nn.Module, Call]:
    """`Awkward` and inputs."""
    return _seeded(Awkward), ((torch.randn(2, 4),), {"scale": torch.full((1,), 2.0)})


def digits() -> tuple[nn.Module, Call]:
    """The shipped model and its example."""
    spec = load_spec("digits")
    inputs = spec.example()
    assert inputs is not None
    return spec.load_model(), inputs


def bert() -> tuple[nn.Module, Call]:
    """BERT with padding, two layers."""
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=100
    )
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]])
    return _seeded(lambda: transformers.BertModel(config)), ((), {"input_ids": _words(), "attention_mask": mask})


def gpt2() -> tuple[nn.Module, Call]:
    """GPT-2 with its keys and values in the output, two layers."""
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=100, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return _seeded(lambda: transformers.GPT2LMHeadModel(config)), ((), {"input_ids": _words()})


def vit() -> tuple[nn.Module, Call]:
    """A vision transformer, two layers."""
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8
    )
    return _seeded(lambda: transformers.ViTForImageClassification(config)), ((torch.randn(1, 3, 32, 32),), {})


def resnet() -> tuple[nn.Module, Call]:
    """A residual network with bottlenecks of two stages."""
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2])
    return _seeded(lambda: transformers.ResNetForImageClassification(config)), ((torch.randn(1, 3, 32, 32),), {})


def _words() -> Tensor:
    return torch.arange(8)[None] * 7 % 100


def _seeded(make: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = make()
    return model.eval()
