"""Settings without which a default configuration, made small, is no model: what its class leaves open or counts."""

from __future__ import annotations

from typing import Any

HYBRID = {"layer_types": ["mamba", "attention"] * 2, "layers_block_type": ["mamba", "attention"] * 2}
MIXTURE = {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "num_expert_group": 1, "num_experts_per_token": 2}

COMMON: list[dict[str, Any]] = [
    {},
    {"head_dim": 16},
    MIXTURE,
    {**MIXTURE, "head_dim": 16, "qk_rope_head_dim": 16},
    {**MIXTURE, "head_dim": 16, "num_key_value_heads": 4, "num_attention_heads": 4, "hidden_size": 64},
    HYBRID,
    {"attn_layer_indices": [1, 3], **HYBRID},
    {"attn_layer_period": 2, "attn_layer_offset": 1},
    {"layer_types": ["conv", "full_attention"] * 2},
    {"layer_types": ["linear_attention", "full_attention"] * 2},
    {"num_kv_shared_layers": 0},
    {"num_key_value_heads": 4, "num_attention_heads": 4, "hidden_size": 64},
    {"num_experts_per_tok": 1, "first_k_dense_replace": 1, "per_layer_config": None},
]
"""Settings of the text configuration, tried in turn where a model does not build or does not generate. A setting that
the configuration does not have is left out."""

ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
PER_CLASS: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"attn_layer_indices": [1, 3]},
    "CohereCompassForCausalLM": {"rope_parameters": {"full_attention": ROTARY, "sliding_attention": ROTARY}},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "topk_method": "greedy"},
    "Dots1ForCausalLM": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "HrmTextForCausalLM": {"num_hidden_layers": 32, "num_layers_per_stack": 4},
    "LagunaForCausalLM": {"num_attention_heads_per_layer": None},
    "LongcatFlashForCausalLM": {"zero_expert_num": 2, "moe_topk": 2, "ffn_hidden_size": 64, "hidden_size": 64},
    "MoonshineStreamingForConditionalGeneration": {"num_key_value_heads": 4, "num_attention_heads": 4},
    "MusicgenForCausalLM": {"num_codebooks": 1},
    "MusicgenMelodyForCausalLM": {"num_codebooks": 1},
    "ReformerModelWithLMHead": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "num_buckets": 4,
        "attn_layers": ["local", "lsh"] * 2,
    },
    "XmodForCausalLM": {"default_language": "en_XX"},
}
"""What only one class needs, tried first."""
