"""The models that `studies.attacks.pressure` serves: small, and each weak at one place."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def language() -> nn.Module:
    """A Llama of four layers, 120 words."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=120, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


class Reads(nn.Module):
    """(B, 8) -> (B, 8); its Python reads two numbers of the data, and makes a tensor of so many elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, columns = int(x[0, 0]), int(x[0, 1])
        y = self.second(self.first(x).relu())
        more = torch.ones(max(1, rows), max(1, columns)).cumsum(0).mean()
        return self.last(y) + more


class Keeps(nn.Module):
    """(B, 8) -> (B, 8); on large inputs it keeps a number, replaces a weight and an activation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.kept: dict[str, Any] = {"scale": 1.0, "memo": None}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if float(y.abs().max()) > 1000:
            self.kept["scale"] *= 0.5
            self.kept["memo"] = y.mean()
            self.second.weight = nn.Parameter(self.second.weight * 2)
        y = self.second(y.tanh()) * self.kept["scale"]
        if self.kept["memo"] is not None:
            y = y + self.kept["memo"]
        return self.last(y)


class Experts(nn.Module):
    """(B, 16) -> (B, 16) by two experts of limited room: rows displace each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.gate = nn.Linear(16, 16), nn.Linear(16, 2)
        self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
        self.last = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        chosen = self.gate(x).argmax(-1)
        found = torch.zeros_like(x)
        room = (x.shape[0] + 1) // 2
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            fits = mine & (mine.cumsum(0) <= room)
            found = found + torch.where(fits.unsqueeze(-1), expert(x), torch.zeros_like(x))
        return self.last(x + found)


SPECS = {
    "language": 'factory = "{here}:language"\n[call_kwargs]\nuse_cache = false\n'
    '[example.kwargs.input_ids]\nshape = [1, 8]\ndtype = "int64"\nhigh = 120\n',
    "reads": 'factory = "{here}:Reads"\n[[example.args]]\nshape = [1, 8]\n',
    "keeps": 'factory = "{here}:Keeps"\n[[example.args]]\nshape = [1, 8]\n',
    "experts": 'factory = "{here}:Experts"\n[[example.args]]\nshape = [1, 16]\n',
}


def spec(name: str) -> str:
    """The text of a spec file."""
    return f'id = "{name}"\n' + SPECS[name].format(here=__name__)
