"""What crosses at the end of each block, by the block's name, against the block's own output; and whether it is exact.

    python -m studies.block_ends             half a minute

`skips` are outputs of earlier blocks that later code still reads (a U-Net's, a ViT's none): they have to cross, too.
Heads and tails run in two copies of the model; an answer counts as exact if its bits are the whole model's.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from edge_client.screen import size, table
from shared_hooks import WrappedModel
from shared_hooks.tensors.staging import identical
from studies.benchmarks.networks import ResNet18, UNet, ViT, built, image


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    blocks: str
    """The names of blocks, as a regular expression."""


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    return LlamaForCausalLM(LlamaConfig(vocab_size=1000, use_cache=False, **sizes))


def _efficientnet() -> nn.Module:
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    return EfficientNetForImageClassification(
        EfficientNetConfig(width_coefficient=0.5, depth_coefficient=0.5, hidden_dim=640)
    )


def _words() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (), {"input_ids": torch.arange(64).reshape(1, 64)}


def _image(side: int) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda: ((torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(1)),), {})


CASES = {
    "ResNet-18": Case(ResNet18, lambda: ((image(),), {}), r"stages\.\d+(\.\d+)?"),
    "ViT (384 x 6)": Case(ViT, lambda: ((image(),), {}), r"blocks\.\d+"),
    "Llama (256 x 4)": Case(_llama, _words, r"model\.layers\.\d+"),
    "U-Net": Case(UNet, _image(256), r"(downs|ups)\.\d+"),
    "EfficientNet (half)": Case(_efficientnet, _image(224), r"efficientnet\.encoder\.blocks\.\d+"),
}


def rows_of(case: Case) -> list[tuple[str, int, int, bool]]:
    """Return for each block, in the order of their ends: name, bytes of its output, bytes that cross, whether exact."""
    model = built(case.build)
    args, kwargs = case.inputs()
    outputs: dict[str, int] = {}
    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: outputs.update({name: _nbytes(output)}))
        for name, module in model.named_modules()
        if re.fullmatch(case.blocks, name)
    ]
    with torch.no_grad():
        model(*args, **kwargs)
    for hook in hooks:
        hook.remove()
    found = []
    with WrappedModel(model) as edge, WrappedModel(copy.deepcopy(model)) as cloud:
        whole = edge.whole(*args, **kwargs)
        edge.plan(*args, **kwargs)
        for name, nbytes in outputs.items():
            early = edge.head(name, *args, **kwargs)
            found.append((name, nbytes, early.nbytes, identical(cloud.tail(early), whole)))
    return found


def _nbytes(output: Any) -> int:
    first = output[0] if isinstance(output, tuple) else output
    return int(first.nbytes)


def main() -> None:
    shown = []
    for title, case in CASES.items():
        for name, output, crosses, exact in rows_of(case):
            more = "" if crosses <= output else size(crosses - output)
            shown.append([title, name, size(output), size(crosses), more, "yes" if exact else "NO"])
    print(table(["model", "block", "output", "crosses", "skips", "exact"], shown, right=(2, 3, 4)))


if __name__ == "__main__":
    main()
