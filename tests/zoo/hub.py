"""Models of the transformers library, from small configurations with random weights, in float32 and eval mode.

The library is imported only when a model is built. `add_hub` names each case ``hf_<model>``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.zoo.case import Call, Draw, add, call

TEXT: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def add_hub(name: str, model: str, make: Callable[[Draw], Call], config: dict[str, Any], **claims: Any) -> None:
    """Add ``transformers.<model>`` built from ``config`` (its class is the model's own ``config_class``)."""

    def make_model() -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        cls = getattr(transformers, model)
        built: nn.Module = cls(cls.config_class(**config))
        return built.float()

    add(f"hf_{name}", make_model, make, tags=frozenset({"hub"}), **claims)


def pixels(size: int, channels: int = 3) -> Callable[[Draw], Call]:
    """``pixel_values`` of shape (1, channels, size, size)."""
    return lambda draw: call(pixel_values=draw.randn(1, channels, size, size))


def padded_text(draw: Draw) -> Call:
    """Two sentences of six tokens, the second padded after its fourth."""
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    return call(input_ids=draw.ints(40, 2, 6), attention_mask=mask)


def causal_text(draw: Draw) -> Call:
    """The same for a decoder, without a cache."""
    args, kwargs = padded_text(draw)
    return args, {**kwargs, "use_cache": False}


# --- named by the issue

add_hub(
    "resnet", "ResNetForImageClassification", pixels(32),
    {"embedding_size": 8, "hidden_sizes": [8, 12, 16, 16], "depths": [1, 2, 1, 1], "layer_type": "bottleneck"},
    listed=True,
)  # fmt: skip
add_hub("mobilenet_v2", "MobileNetV2ForImageClassification", pixels(32), {"depth_multiplier": 0.1})
VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
add_hub("vit", "ViTForImageClassification", pixels(16), {**VIT, "image_size": 16, "patch_size": 8}, listed=True)
BERT = {**TEXT, "intermediate_size": 32}
add_hub("bert", "BertForSequenceClassification", padded_text, BERT, listed=True)
add_hub("bert_eager", "BertModel", padded_text, {**BERT, "attn_implementation": "eager"}, listed=True)
add_hub(
    "gpt2", "GPT2LMHeadModel", causal_text,
    {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}, listed=True,
)  # fmt: skip
LLAMA = {**TEXT, "intermediate_size": 32, "num_key_value_heads": 1, "max_position_embeddings": 32}
add_hub("llama", "LlamaForCausalLM", causal_text, LLAMA, listed=True)

# --- others

CACHE = "a cache object is passed from layer to layer; its cuts may be refused"
add_hub(
    "gpt2_with_cache", "GPT2Model", padded_text,
    {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}, max_refused=1.0, notes=CACHE,
)  # fmt: skip
add_hub("llama_with_cache", "LlamaModel", padded_text, LLAMA, max_refused=1.0, notes=CACHE)
add_hub(
    "distilbert",
    "DistilBertModel",
    padded_text,
    {"vocab_size": 40, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
)
add_hub(
    "bert_hidden_states", "BertModel",
    lambda draw: call(input_ids=draw.ints(40, 1, 5), output_hidden_states=True, output_attentions=True),
    {**BERT, "attn_implementation": "eager"},
    notes="hidden states and attentions are collected by the library's own hooks", max_refused=1.0,
)  # fmt: skip
T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
add_hub(
    "t5", "T5ForConditionalGeneration",
    lambda draw: call(input_ids=draw.ints(40, 1, 5), decoder_input_ids=draw.ints(40, 1, 4), use_cache=False), T5,
)  # fmt: skip
add_hub(
    "swin", "SwinForImageClassification", pixels(32),
    {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4},
)  # fmt: skip
add_hub(
    "segformer", "SegformerForSemanticSegmentation", pixels(32),
    {
        "hidden_sizes": [8, 8, 12, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2],
        "decoder_hidden_size": 8,
    },
)  # fmt: skip
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
add_hub(
    "clip", "CLIPModel",
    lambda draw: call(
        input_ids=torch.cat([draw.ints(38, 2, 4), torch.full((2, 1), 39)], 1),
        pixel_values=draw.randn(1, 3, 16, 16), attention_mask=torch.ones(2, 5, dtype=torch.long),
    ),
    {
        "text_config": {**TOWER, "vocab_size": 40, "eos_token_id": 39, "bos_token_id": 0},
        "vision_config": {**TOWER, "image_size": 16, "patch_size": 8}, "projection_dim": 8,
    },
)  # fmt: skip
add_hub(
    "whisper", "WhisperModel",
    lambda draw: call(input_features=draw.randn(1, 8, 20), decoder_input_ids=draw.ints(40, 1, 4), use_cache=False),
    {
        "vocab_size": 40, "num_mel_bins": 8, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
        "max_source_positions": 10, "max_target_positions": 10, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 1,
    },
)  # fmt: skip
add_hub(
    "convnext", "ConvNextForImageClassification", pixels(32), {"hidden_sizes": [8, 8, 12, 16], "depths": [1, 1, 1, 1]}
)
add_hub("electra", "ElectraModel", padded_text, {**BERT, "embedding_size": 8})
add_hub("roberta", "RobertaModel", padded_text, {**BERT, "pad_token_id": 0, "max_position_embeddings": 20})
add_hub(
    "opt", "OPTForCausalLM", causal_text,
    {
        "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32,
        "max_position_embeddings": 16, "word_embed_proj_dim": 16,
    },
)  # fmt: skip
add_hub(
    "mixtral", "MixtralForCausalLM", causal_text, {**LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2},
    branches=True,
)  # fmt: skip
add_hub("gemma", "GemmaForCausalLM", causal_text, {**LLAMA, "head_dim": 8})
add_hub(
    "mamba", "MambaModel", lambda draw: call(input_ids=draw.ints(40, 1, 5), use_cache=False),
    {"vocab_size": 40, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2},
)  # fmt: skip
add_hub(
    "wav2vec2", "Wav2Vec2Model", lambda draw: call(draw.randn(1, 400)),
    {
        **TOWER, "vocab_size": 40, "conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3],
        "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    },
)  # fmt: skip
add_hub("dinov2", "Dinov2Model", pixels(16), {**VIT, "image_size": 16, "patch_size": 8})
add_hub(
    "regnet",
    "RegNetModel",
    pixels(32),
    {"embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "groups_width": 8},
)
add_hub(
    "bart", "BartModel",
    lambda draw: call(input_ids=draw.ints(40, 1, 5), decoder_input_ids=draw.ints(40, 1, 4), use_cache=False),
    {
        "vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 16,
    },
)  # fmt: skip
