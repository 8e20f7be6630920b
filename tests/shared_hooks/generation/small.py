"""Small language models with random weights, and generate() with and without a cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shared_hooks.generation import DecodingTail, InProcess, SplitForward

WORDS = 120
_COMMON = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_KEYS = {"num_key_value_heads": 2}
_GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128, "vocab_size": WORDS, "pad_token_id": 0}
_T5 = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4, "pad_token_id": 0}
_HYBRID = {"layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 64}

MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    # class of transformers, configuration, a block in the middle
    "llama": ("LlamaForCausalLM", {**_COMMON, **_KEYS}, "model.layers.1"),
    "gpt2": ("GPT2LMHeadModel", {**_GPT2, "bos_token_id": 1, "eos_token_id": None}, "transformer.h.1"),
    "sliding": ("MistralForCausalLM", {**_COMMON, **_KEYS, "sliding_window": 8}, "model.layers.2"),
    "experts": ("MixtralForCausalLM", {**_COMMON, **_KEYS, "num_local_experts": 4}, "model.layers.1"),
    "mamba": ("MambaForCausalLM", {**_COMMON, "state_size": 8}, "backbone.layers.1"),
    "hybrid": ("Lfm2ForCausalLM", {**_COMMON, **_KEYS, **_HYBRID}, "model.layers.1"),
    "bloom": ("BloomForCausalLM", {**_COMMON, "n_layer": 4, "n_head": 4}, "transformer.h.1"),
    "t5": (
        "T5ForConditionalGeneration",
        {**_T5, "decoder_start_token_id": 0, "eos_token_id": None},
        "decoder.block.1",
    ),
}


def sees() -> Any:
    """A configuration of LLaVA: a CLIP and a Llama."""
    import transformers

    return transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=16,
            patch_size=8,
            projection_dim=16,
        ),
        text_config=transformers.LlamaConfig(**{**_COMMON, **_KEYS}),
        image_token_index=5,
        image_token_id=5,
        vision_feature_layer=-1,
    )


def hears() -> dict[str, Any]:
    """For Whisper."""
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 20, "max_target_positions": 60}
    words = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 1}
    quiet = {"suppress_tokens": None, "begin_suppress_tokens": None}
    layers = {"encoder_layers": 2, "decoder_layers": 3, "d_model": 32, "num_mel_bins": 8, "vocab_size": WORDS}
    return {**heads, **sizes, **words, **quiet, **layers}


def make(name: str) -> nn.Module:
    """The same weights every time; sharpened, so that the likeliest words differ."""
    import transformers

    if name == "sees":
        return _made(transformers.LlavaForConditionalGeneration, sees())
    if name == "hears":
        return _made(transformers.WhisperForConditionalGeneration, transformers.WhisperConfig(**hears()))
    cls_name, config, _ = MODELS[name]
    cls = getattr(transformers, cls_name)
    return _made(cls, cls.config_class(**config))


def _made(cls: Any, config: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


def prompt(rows: int = 1, length: int = 11) -> dict[str, torch.Tensor]:
    """Token ids with padding on the left of all rows but the first."""
    ids = torch.randint(6, WORDS, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        ids[row, : row + 1] = 0
        mask[row, : row + 1] = 0
    return {"input_ids": ids, "attention_mask": mask}


def cut_of(name: str) -> str:
    others = {"sees": "model.language_model.layers.1", "hears": "model.decoder.layers.1"}
    return others[name] if name in others else MODELS[name][2]


def in_process(name: str, record: list[bytes] | None = None) -> InProcess:
    return InProcess(DecodingTail(make(name), cut_of(name)), record)


def both(
    name: str, inputs: dict[str, torch.Tensor], run: Callable[[nn.Module], Any] | None = None, **settings: Any
) -> tuple[Any, Any, SplitForward]:
    """What generate() gives on the whole model, and what it gives split; and how that went."""
    asked = {"max_new_tokens": 16, "do_sample": False, **settings}

    def generate(model: nn.Module) -> Any:
        torch.manual_seed(5)
        return run(model) if run else model.generate(**inputs, **asked)  # type: ignore[operator]

    model = make(name)
    whole = generate(model)
    with SplitForward(model, cut_of(name), in_process(name)) as split:
        found = generate(model)
    return whole, found, split
