"""Models of transformers, small. Weights are made by whole numbers: the same bits on every machine."""

from __future__ import annotations

import math
import zlib
from typing import TypeVar

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

_STEPS = 1 << 16
_Model = TypeVar("_Model", bound=nn.Module)


def resnet() -> nn.Module:
    """Bottlenecks and skips, as in a ResNet-50; 64 x 64 pixels."""
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32, 64, 64], "depths": [1, 2, 1, 1]}
    return filled(ResNetForImageClassification(ResNetConfig(**sizes, layer_type="bottleneck", num_labels=10)))


def vit() -> nn.Module:
    """Three layers of width 48; 32 x 32 pixels."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 96}
    return filled(ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=10)))


def bert() -> nn.Module:
    """Three layers of width 48; 500 tokens are known."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 96}
    return filled(BertModel(BertConfig(**sizes, vocab_size=500)))


def filled(model: _Model) -> _Model:
    """``model`` with weights that look random, of a size that keeps values of layers near one; in eval."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            steps = torch.arange(tensor.numel(), dtype=torch.int64) * 40503 + zlib.crc32(name.encode())
            steps = (steps * (steps % 65521 + 1)) % _STEPS - _STEPS // 2
            # a power of two: multiplying by it rounds nothing
            inputs = max(1, tensor.numel() // max(1, tensor.shape[0]))
            scale = 2.0 ** (1 - round(math.log2(math.sqrt(inputs)))) if tensor.dim() > 1 else 0.25
            values = steps.to(torch.float32) * (2 * scale / _STEPS)
            centre = 1.0 if tensor.dim() == 1 and name.endswith("weight") else 0.0  # of a norm
            tensor.copy_((centre + values).reshape(tensor.shape))
    return model.eval()
