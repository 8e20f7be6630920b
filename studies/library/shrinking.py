"""Configurations of transformers made small: widths divided by one number all through, so that what has to fit fits.

A width is an integer under a name that says so. One factor keeps heads, groups, rotary sections and the widths that
one part hands to the next in proportion, whatever they are called; layers, vocabularies, experts and pictures have
rules of their own.
"""

from __future__ import annotations

import re
from typing import Any

VOCABULARY = 256
MOST_LAYERS = 2
MISSING = {"prediction_length": 8, "vocab_size": VOCABULARY}  # what some classes have no default for
WIDTH = re.compile(
    r"hidden|dim|width|channels|embd|d_model|d_kv|d_ff|ffn|inner|intermediate|rank|filters|units|latent"
    r"|n_embed|_size$|stem|planes|features$|^d_"
)
NOT_WIDTH = re.compile(
    r"vocab|patch|kernel|image|window|stride|chunk|batch|position|layers|num_heads|n_head|token|num_channels|in_channels"
    r"|group|rate|mel|feature_size|labels|expand|dilation|pool|block|bucket|length|temporal|tubelet|factor|ratio"
    r"|codebook|out_features|out_indices|num_hidden|crop|levels|axis|num_attention|context|merge|grid|hop|fft|frame"
    r"|num_channel|input_size|sample|audio_channels"
)
LAYERS = re.compile(r"(^|_)(layers?|blocks?|depth|n_layers?)$|num_hidden_layers|num_layers|num_blocks")
NOT_LAYERS = re.compile(
    r"feat_extract|feature_layer|conv_layers|select|sparse|dense|pos_|extract|upsampl|num_stages|kv"
)
EXPERTS = re.compile(r"(num|n)_(local_|routed_)?experts$|moe_num_experts|num_experts$")


def changes(config: Any, factor: int, ids: dict[int, int], *, mixed: bool, layers: int = MOST_LAYERS) -> dict[str, Any]:
    """What to tell the configuration's class so that it is small. ``ids``: special tokens, old to new; ``mixed``: keep
    layers of different kinds where settings are given layer by layer, else what the class makes of fewer layers.
    ``layers``: how many at most.
    """
    found: dict[str, Any] = {}
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            inner = changes(value, factor, ids, mixed=mixed, layers=layers)
            found[name] = {**_reported(value), **inner}
        elif not name.startswith("_"):
            if mixed and isinstance(value, (list, tuple)) and len(value) == _layers_of(config) > layers:
                value = type(value)(_chosen(value, layers))
                found[name] = value
            new = _small(name, value, factor, ids, config, layers)
            if new is not value and new != value:
                found[name] = new
    return found


def _reported(config: Any) -> dict[str, Any]:
    """A part's own settings without those that its class works out from others."""
    derived = ("layer_types", "head_dim", "stage_names", "out_indices", "out_features", "transformers_version")
    derived += ("per_layer_config",)  # its layers are those of the configuration at full size
    return {
        name: value
        for name, value in config.to_dict().items()
        if (name not in derived and not name.startswith("_")) or name == "model_type"
    }


def _small(name: str, value: Any, factor: int, ids: dict[int, int], config: Any, layers: int) -> Any:
    if value is None and name in MISSING:
        return MISSING[name]
    if isinstance(value, bool) or value is None or isinstance(value, (str, float)):
        return value
    if isinstance(value, dict) and value and all(isinstance(key, int) for key in value):
        return {key: item for key, item in value.items() if key < layers}
    if re.search(r"(token_id|token_index|_id|token_ids|_token)$", name):
        return _each(value, lambda one: ids.setdefault(one, VOCABULARY - 1 - len(ids)) if one >= 200 else one)
    if name.endswith("mrope_section") or name == "rope_parameters":
        return _rotary(value, factor, config)
    if isinstance(value, int):
        if "vocab" in name and "type" not in name and value > VOCABULARY:
            return VOCABULARY
        if name in ("max_position_embeddings", "n_positions", "n_ctx") and value > 1024:
            return 512
        if EXPERTS.search(name):
            return min(value, 4)
        if name in ("num_experts_per_tok", "top_k", "moe_topk", "moe_k"):
            return min(value, 2)
        if name in ("n_group", "topk_group"):
            return 1
        if name == "first_k_dense_replace":
            return min(value, 1)
        if name == "num_frames":
            return min(value, 4)
    if name.endswith(("image_size", "img_size")) or name == "crop_size":
        return _each(value, lambda one: _picture(one, config))
    if name == "depths" or (LAYERS.search(name) and not NOT_LAYERS.search(name)):
        return _each(value, lambda one: min(one, layers))
    if WIDTH.search(name) and not NOT_WIDTH.search(name):
        return _each(value, lambda one: one // factor if one >= 16 else one)
    return value


def _each(value: Any, rule: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return rule(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_each(item, rule) for item in value)
    return value


def _picture(size: int, config: Any) -> int:
    patch = getattr(config, "patch_size", None)
    if size <= 64:
        return size
    return 4 * patch if isinstance(patch, int) and 8 <= patch <= 32 else 64


def _layers_of(config: Any) -> int:
    """How many layers a part has; 0 if it does not say."""
    found = (getattr(config, name, None) for name in ("num_hidden_layers", "num_layers", "n_layer", "depth"))
    return next((number for number in found if isinstance(number, int)), 0)


def _chosen(settings: Any, layers: int) -> list[Any]:
    """Return a setting for each layer: each kind once, in the order of their first occurrence, repeated."""
    kinds: list[Any] = []
    for one in settings:
        if one not in kinds:
            kinds.append(one)
    return [kinds[number % len(kinds)] for number in range(layers)]


def _rotary(value: Any, factor: int, config: Any) -> Any:
    if isinstance(value, dict):
        asks = "mrope_section" in getattr(config, "ignore_keys_at_rope_validation", ()) and "rope_type" in value
        if asks and (sections := _sections(config))[0]:  # else the model's own default, of full width
            value = {"mrope_section": sections, **value}
        return {key: _rotary(item, factor, config) if key == "mrope_section" else item for key, item in value.items()}
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, int) for item in value):
        half = sum(value) // factor
        rest = [item * half // sum(value) for item in value[1:]]
        return [half - sum(rest), *rest]
    return value


def _sections(config: Any) -> list[int]:
    """The rotary sections of time, height and width, at full size; none where a part does not say how wide it is."""
    heads, width = getattr(config, "num_attention_heads", None), getattr(config, "head_dim", None)
    if width is None and heads and getattr(config, "hidden_size", None):
        width = config.hidden_size // heads
    share = getattr(config, "partial_rotary_factor", None) or config.rope_parameters.get("partial_rotary_factor", 1)
    half = int((width or 0) * share) // 2
    return [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8]
