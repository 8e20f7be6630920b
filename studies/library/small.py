"""Models of some sixty small libraries that have ways of their own: each by its class and arguments. None is a
dependency; what is not installed counts as unusable.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from studies.library.others import Inputs, prepared
from studies.library.subject import Subject


def _of(*shape: int, **more: Any) -> Inputs:
    return lambda generator: ((torch.randn(shape, generator=generator),), more)


def _words(count: int = 12) -> Inputs:
    return lambda generator: ((torch.randint(1, 60, (1, count), generator=generator),), {})


def _pair(first: Inputs, second: Inputs) -> Inputs:
    return lambda generator: ((*first(generator)[0], *second(generator)[0]), {})


def _matched(generator: torch.Generator) -> Any:
    return ({f"image{number}": torch.rand(1, 1, 64, 64, generator=generator) for number in range(2)},), {}


def _deepar(generator: torch.Generator) -> Any:
    times = torch.randn(2, 20, 1, generator=generator), torch.randn(2, 20, generator=generator), torch.ones(2, 20)
    static = torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 1)
    return (*static, *times, torch.randn(2, 4, 1, generator=generator)), {"num_parallel_samples": 2}


def _window(series: int) -> Inputs:
    """What neuralforecast's models are called with."""
    absent = dict.fromkeys(("outsample_y", "hist_exog", "futr_exog", "stat_exog"))

    def draw(generator: torch.Generator) -> Any:
        seen = torch.randn(2, 16, series, generator=generator)
        return ({"insample_y": seen, "insample_mask": torch.ones_like(seen), **absent},), {}

    return draw


PICTURE, LARGE, GREY, ROW = _of(1, 3, 32, 32), _of(1, 3, 64, 64), _of(1, 1, 32, 32), _of(2, 6)
SEQUENCE, SERIES, WORDS = _of(1, 12, 32), _of(2, 3, 24), _words()

VIT: dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 48,
}  # fmt: skip
TEXT: dict[str, Any] = {"num_tokens": 64, "dim": 32, "depth": 2}
FLAT: dict[str, Any] = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}

Entry = tuple[str, str, Inputs, dict[str, Any]]
ENTRIES: list[Entry] = [
    *(("vit_pytorch." + name, kind, PICTURE, VIT) for name, kind in (
        ("vit", "ViT"), ("simple_vit", "SimpleViT"), ("deepvit", "DeepViT"), ("vit_for_small_dataset", "ViT"),
        ("learnable_memory_vit", "ViT"), ("rvt", "RvT"), ("vit_with_patch_dropout", "ViT"), ("jumbo_vit", "JumboViT"),
        ("simple_vit_with_register_tokens", "SimpleViT"), ("simple_vit_with_qk_norm", "SimpleViT"),
    )),
    ("vit_pytorch.cait", "CaiT", PICTURE, {**VIT, "cls_depth": 1}),
    ("vit_pytorch.xcit", "XCiT", PICTURE, {**VIT, "cls_depth": 1}),
    ("vit_pytorch.parallel_vit", "ViT", PICTURE, {**VIT, "num_parallel_branches": 2}),
    ("vit_pytorch.ats_vit", "ViT", PICTURE, {**VIT, "max_tokens_per_depth": (12, 8)}),
    ("vit_pytorch.vit_with_patch_merger", "ViT", PICTURE,
     {**VIT, "patch_merge_layer": 1, "patch_merge_num_tokens": 4}),
    ("vit_pytorch.simple_vit_with_hyper_connections", "SimpleViT", PICTURE, {**VIT, "num_residual_streams": 2}),
    ("vit_pytorch.na_vit", "NaViT",
     lambda g: (([[torch.randn(3, 16, 24, generator=g), torch.randn(3, 8, 8, generator=g)],
                  [torch.randn(3, 32, 16, generator=g)]],), {}), VIT),
    ("vit_pytorch.max_vit", "MaxViT", LARGE,
     {"num_classes": 5, "dim_conv_stem": 16, "dim": 16, "dim_head": 8, "depth": (1, 1), "window_size": 4}),
    ("vit_pytorch.nest", "NesT", PICTURE,
     {"image_size": 32, "patch_size": 4, "dim": 16, "heads": 2, "num_hierarchies": 2, "block_repeats": (1, 1),
      "num_classes": 5}),
    ("performer_pytorch", "PerformerLM", WORDS, {**TEXT, "max_seq_len": 32, "heads": 2}),
    ("perceiver_pytorch", "Perceiver", _of(1, 8, 8, 3),
     {"input_channels": 3, "input_axis": 2, "num_freq_bands": 2, "max_freq": 4.0, "depth": 2, "num_latents": 8,
      "latent_dim": 16, "cross_heads": 1, "latent_heads": 2, "cross_dim_head": 8, "latent_dim_head": 8,
      "num_classes": 5}),
    ("mlp_mixer_pytorch", "MLPMixer", PICTURE,
     {"image_size": 32, "channels": 3, "patch_size": 8, "dim": 32, "depth": 2, "num_classes": 5}),
    ("linformer", "LinformerLM", WORDS, {**TEXT, "seq_len": 12, "heads": 2, "k": 4}),
    ("reformer_pytorch", "ReformerLM", _words(16), {**TEXT, "heads": 2, "max_seq_len": 16, "bucket_size": 4}),
    ("local_attention", "LocalTransformer", _words(16),
     {**TEXT, "max_seq_len": 16, "local_attn_window_size": 4, "heads": 2, "dim_head": 16}),
    ("nystrom_attention", "Nystromformer", SEQUENCE,
     {"dim": 32, "dim_head": 8, "heads": 2, "depth": 2, "num_landmarks": 4}),
    ("routing_transformer", "RoutingTransformerLM", _words(16),
     {**TEXT, "heads": 2, "max_seq_len": 16, "causal": True, "window_size": 4}),
    ("sinkhorn_transformer", "SinkhornTransformerLM", _words(16),
     {**TEXT, "heads": 2, "max_seq_len": 16, "bucket_size": 4}),
    ("linear_attention_transformer", "LinearAttentionTransformerLM", _words(16),
     {**TEXT, "heads": 2, "max_seq_len": 16, "causal": True}),
    ("h_transformer_1d", "HTransformer1D", _words(16),
     {**TEXT, "max_seq_len": 16, "causal": False, "heads": 2, "dim_head": 8, "block_size": 4}),
    ("g_mlp_pytorch", "gMLP", WORDS, {**TEXT, "seq_len": 12}),
    ("palm_pytorch", "PaLM", WORDS, {**TEXT, "heads": 2, "dim_head": 16}),
    ("mega_pytorch", "Mega", WORDS, {**TEXT, "ema_heads": 4, "attn_dim_qk": 8, "attn_dim_value": 16}),
    ("conformer", "Conformer", SEQUENCE, {"dim": 32, "depth": 1, "dim_head": 8, "heads": 2}),
    ("vector_quantize_pytorch", "VectorQuantize", SEQUENCE, {"dim": 32, "codebook_size": 16}),
    ("vector_quantize_pytorch", "ResidualVQ", SEQUENCE, {"dim": 32, "codebook_size": 16, "num_quantizers": 3}),
    ("siren_pytorch", "SirenNet", _of(5, 2), {"dim_in": 2, "dim_hidden": 16, "dim_out": 3, "num_layers": 3}),
    ("denoising_diffusion_pytorch", "Unet",
     lambda g: ((torch.randn(1, 3, 16, 16, generator=g), torch.tensor([3.0])), {}),
     {"dim": 8, "dim_mults": (1, 2), "flash_attn": False}),
    ("monai.networks.nets", "UNet", GREY, {**FLAT, "channels": (4, 8, 16), "strides": (2, 2), "num_res_units": 1}),
    ("monai.networks.nets", "BasicUNet", GREY, {**FLAT, "features": (4, 4, 8, 8, 8, 4)}),
    ("monai.networks.nets", "AttentionUnet", GREY, {**FLAT, "channels": (4, 8, 16), "strides": (2, 2)}),
    ("monai.networks.nets", "DynUNet", GREY,
     {**FLAT, "kernel_size": [3] * 4, "strides": [1, 2, 2, 2], "upsample_kernel_size": [2] * 3,
      "filters": [4, 8, 8, 8], "deep_supervision": True, "deep_supr_num": 1}),
    ("monai.networks.nets", "SegResNet", GREY, {**FLAT, "init_filters": 8}),
    ("monai.networks.nets", "SwinUNETR", _of(1, 1, 64, 64), {**FLAT, "feature_size": 12}),
    ("monai.networks.nets", "DenseNet121", _of(1, 1, 64, 64), FLAT),
    ("monai.networks.nets", "FlexibleUNet", LARGE,
     {"in_channels": 3, "out_channels": 2, "backbone": "efficientnet-b0"}),
    ("neuralop.models", "FNO", _of(1, 1, 16, 16),
     {"n_modes": (6, 6), "hidden_channels": 8, "in_channels": 1, "out_channels": 1, "n_layers": 2}),
    ("neuralop.models", "TFNO", _of(1, 1, 16, 16),
     {"n_modes": (6, 6), "hidden_channels": 8, "in_channels": 1, "out_channels": 1, "n_layers": 2,
      "factorization": "tucker", "implementation": "factorized", "rank": 0.3}),
    ("rtdl_revisiting_models", "MLP", ROW, {"d_in": 6, "d_out": 1, "n_blocks": 2, "d_block": 8, "dropout": 0.1}),
    ("pytorch_tcn", "TCN", SERIES, {"num_inputs": 3, "num_channels": [4, 4]}),
    ("torchrl.modules", "MLP", ROW, {"in_features": 6, "out_features": 3, "num_cells": [8, 8]}),
    ("torchrl.modules", "ConvNet", PICTURE, {"in_features": 3, "num_cells": [4, 4], "kernel_sizes": 3}),
    ("segment_anything.modeling", "ImageEncoderViT", LARGE,
     {"img_size": 64, "embed_dim": 24, "depth": 2, "num_heads": 2, "out_chans": 8, "use_rel_pos": True,
      "window_size": 2, "global_attn_indexes": (1,)}),
    ("mambapy.mamba", "Mamba", SEQUENCE, {"config": ("mambapy.mamba", "MambaConfig", {"d_model": 32, "n_layers": 2})}),
    ("demucs.demucs", "Demucs", _of(1, 1, 2048),
     {"sources": ["a", "b"], "audio_channels": 1, "channels": 4, "depth": 2, "dconv_mode": 0, "lstm_layers": 1,
      "resample": False, "rescale": 0}),
    ("vector_quantize_pytorch", "VectorQuantize", SEQUENCE, {"dim": 32, "codebook_size": 8, "use_cosine_sim": True}),
    ("vector_quantize_pytorch", "ResidualFSQ", SEQUENCE, {"dim": 32, "levels": [4, 4], "num_quantizers": 2}),
    ("vector_quantize_pytorch", "GroupedResidualVQ", SEQUENCE,
     {"dim": 32, "codebook_size": 8, "num_quantizers": 2, "groups": 2}),
    ("perceiver_pytorch", "Perceiver", _of(1, 16, 16, 3),
     {"input_channels": 3, "input_axis": 2, "num_freq_bands": 2, "max_freq": 10.0, "depth": 2, "num_latents": 8,
      "latent_dim": 16, "cross_heads": 1, "latent_heads": 2, "cross_dim_head": 8, "latent_dim_head": 8,
      "num_classes": 3, "weight_tie_layers": True}),
    ("slot_attention", "SlotAttention", SEQUENCE, {"num_slots": 3, "dim": 32, "iters": 3}),
    ("performer_pytorch", "PerformerLM", WORDS,
     {"num_tokens": 64, "max_seq_len": 32, "dim": 16, "depth": 2, "heads": 2, "dim_head": 8, "reversible": True}),
    ("linformer", "LinformerLM", WORDS, {"num_tokens": 64, "dim": 16, "seq_len": 12, "depth": 2, "heads": 2, "k": 8}),
    ("egnn_pytorch", "EGNN", _pair(_of(1, 6, 8), _of(1, 6, 3)), {"dim": 8}),
    ("st_moe_pytorch", "MoE", _of(1, 16, 16), {"dim": 16, "num_experts": 4, "gating_top_n": 2}),
    ("soft_moe_pytorch", "SoftMoE", _of(1, 16, 16), {"dim": 16, "seq_len": 16, "num_experts": 4}),
    ("mixture_of_experts", "MoE", _of(1, 16, 16), {"dim": 16, "num_experts": 4}),
    ("conformer", "Conformer", SEQUENCE, {"dim": 32, "depth": 2, "dim_head": 8, "heads": 2}),
    ("ncps.torch", "CfC", SEQUENCE, {"input_size": 32, "units": 8}),
    ("axial_attention", "AxialImageTransformer", _of(1, 8, 8, 8), {"dim": 8, "depth": 2, "heads": 2}),
    ("glom_pytorch", "Glom", _of(1, 3, 16, 16), {"dim": 16, "levels": 3, "image_size": 16, "patch_size": 4}),
    ("feedback_transformer_pytorch", "FeedbackTransformer", WORDS,
     {"num_tokens": 64, "dim": 16, "depth": 2, "seq_len": 4, "mem_len": 8, "heads": 2, "dim_head": 8}),
    ("compressive_transformer_pytorch", "CompressiveTransformer", _words(8),
     {"num_tokens": 64, "emb_dim": 16, "dim": 16, "depth": 2, "heads": 2, "seq_len": 8, "mem_len": 8, "cmem_len": 2,
      "cmem_ratio": 4}),
    ("block_recurrent_transformer_pytorch", "BlockRecurrentTransformer", _words(32),
     {"num_tokens": 64, "dim": 16, "depth": 2, "dim_head": 8, "heads": 2, "max_seq_len": 32, "block_width": 8,
      "num_state_vectors": 8, "recurrent_layers": (1,), "use_flash_attn": False}),
    ("infini_transformer_pytorch", "InfiniTransformer", WORDS,
     {"num_tokens": 64, "dim": 16, "depth": 2, "dim_head": 8, "heads": 2}),
    ("speechbrain.lobes.models.ECAPA_TDNN", "ECAPA_TDNN", _of(1, 30, 16),
     {"input_size": 16, "channels": [16, 16, 16, 16, 48], "attention_channels": 8, "lin_neurons": 12}),
    ("speechbrain.lobes.models.Cnn14", "Cnn14", _of(1, 64, 64), {"mel_bins": 64, "emb_dim": 16}),
    ("kornia.feature", "LoFTR", _matched, {"pretrained": None}),
    ("kornia.feature", "DISK", PICTURE, {}),
    ("kornia.feature", "KeyNet", _of(1, 1, 48, 48), {"pretrained": False}),
    ("gluonts.torch.model.deepar", "DeepARModel", _deepar,
     {"freq": "D", "context_length": 8, "prediction_length": 4, "num_feat_dynamic_real": 1, "num_feat_static_real": 1,
      "num_feat_static_cat": 1, "cardinality": [2], "hidden_size": 8, "lags_seq": [1, 2], "num_layers": 1}),
    ("gluonts.torch.model.patch_tst", "PatchTSTModel", _pair(_of(2, 16), _of(2, 16)),
     {"prediction_length": 4, "context_length": 16, "num_feat_dynamic_real": 0, "patch_len": 4, "stride": 2,
      "padding_patch": "end", "d_model": 8, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0, "activation": "relu",
      "norm_first": False, "num_encoder_layers": 1, "scaling": "mean"}),
]  # fmt: skip

DECODERS: dict[str, dict[str, Any]] = {
    "plain": {}, "rotary": {"rotary_pos_emb": True}, "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 1},
    "buckets": {"rel_pos_bias": True}, "dynamic": {"dynamic_pos_bias": True}, "gated": {"ff_glu": True},
    "heads": {"attn_pre_talking_heads": True}, "sparse": {"attn_sparse_topk": 4}, "memory": {"attn_num_mem_kv": 4},
    "macaron": {"macaron": True}, "residual": {"residual_attn": True}, "shifted": {"shift_tokens": 1},
    "streams": {"num_residual_streams": 2}, "skips": {"unet_skips": True}, "laser": {"attn_laser": True},
    "cope": {"attn_use_cope": True}, "tied": {"weight_tie_layers": True},
}  # fmt: skip
"""What `x_transformers` makes of a decoder of two layers."""

_RECURRENT = {"encoder_hidden_size": 8, "decoder_hidden_size": 8}
_ATTENTIVE = {"hidden_size": 8, "n_head": 2, "conv_hidden_size": 8}
FORECASTERS: dict[str, dict[str, Any]] = {
    "Autoformer": _ATTENTIVE, "BiTCN": {"hidden_size": 4}, "DilatedRNN": {}, "DLinear": {}, "Informer": _ATTENTIVE,
    "FEDformer": {"hidden_size": 16, "n_head": 8, "conv_hidden_size": 8, "modes": 4}, "GRU": _RECURRENT,
    "LSTM": _RECURRENT, "MLP": {"hidden_size": 8}, "NBEATS": {"mlp_units": 3 * [[8, 8]]},
    "NHITS": {"mlp_units": 3 * [[8, 8]]}, "NLinear": {}, "RNN": _RECURRENT, "TCN": _RECURRENT,
    "PatchTST": {"hidden_size": 8, "n_heads": 2, "linear_hidden_size": 8, "patch_len": 4, "stride": 2},
    "TFT": {"hidden_size": 8, "n_head": 2}, "TiDE": {"hidden_size": 8, "decoder_output_dim": 4},
    "TimesNet": {"hidden_size": 8, "conv_hidden_size": 8, "top_k": 2}, "VanillaTransformer": _ATTENTIVE,
    "DeepNPTS": {"hidden_size": 8}, "xLSTM": _RECURRENT,
}  # fmt: skip
SEVERAL_SERIES: dict[str, dict[str, Any]] = {
    "iTransformer": {"hidden_size": 8, "n_heads": 2, "d_ff": 8}, "MLPMultivariate": {"hidden_size": 8},
    "SOFTS": {"hidden_size": 8, "d_core": 8, "d_ff": 8}, "StemGNN": {}, "TSMixer": {"ff_dim": 8},
    "TimeMixer": {"d_model": 8, "d_ff": 8, "down_sampling_layers": 1},
    "TimeXer": {"hidden_size": 8, "n_heads": 2, "d_ff": 8, "patch_len": 4},
    "RMoK": {"taylor_order": 2, "jacobi_degree": 2},
}  # fmt: skip
FLOWS: dict[str, dict[str, Any]] = {
    "NSF": {"transforms": 2}, "MAF": {"transforms": 2}, "NAF": {"transforms": 1}, "CNF": {}, "NICE": {"transforms": 2},
    "SOSPF": {"transforms": 1}, "BPF": {"transforms": 1},
}  # fmt: skip
DECODERS_OF_LITGPT: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {
        "n_query_groups": 2,
        "norm_class_name": "RMSNorm",
        "mlp_class_name": "LLaMAMLP",
        "intermediate_size": 24,
    },
    "window": {"sliding_window_size": 4, "sliding_window_indices": [1, 0, 1]},
    "experts": {"mlp_class_name": "LLaMAMoE", "intermediate_size": 24, "n_expert": 4, "n_expert_per_token": 2},
}  # fmt: skip


def subjects() -> Iterator[Subject]:
    """Every entry, every decoder of x-transformers, and the cases below."""
    for module, kind, inputs, options in ENTRIES:
        yield _subject(f"{module}.{kind}", functools.partial(_made, module, kind, options), inputs)
    for name, options in DECODERS.items():
        yield _subject(f"x_transformers.{name}", functools.partial(_decoder, options), WORDS)
    forecasts: dict[str, Any] = {"h": 4, "input_size": 16, "max_steps": 1}
    for name, options in FORECASTERS.items():
        make = functools.partial(_made, "neuralforecast.models", name, {**forecasts, **options})
        yield _subject(f"neuralforecast.{name}", make, _window(1))
    for name, options in SEVERAL_SERIES.items():
        make = functools.partial(_made, "neuralforecast.models", name, {**forecasts, "n_series": 3, **options})
        yield _subject(f"neuralforecast.{name}", make, _window(3))
    for name, options in FLOWS.items():
        yield _subject(f"zuko.{name}", functools.partial(_flow, name, options), _pair(_of(4, 3), _of(4, 2)))
    for name, options in DECODERS_OF_LITGPT.items():
        yield _subject(f"litgpt.{name}", functools.partial(_litgpt, options), WORDS)
    for name, make, inputs in (
        ("spikingjelly", _spiking, ROW),
        ("e3nn", _equivariant, _of(3, 10)),
        ("ncps", _liquid, _of(1, 6, 4)),
        ("lightning", _lightning, ROW),
        ("geotorch", _orthogonal, ROW),
        ("torchdiffeq", _solved, ROW),
        *((f"peft.{method}", functools.partial(_adapted, method), WORDS) for method in ADAPTERS),
    ):
        yield _subject(name, make, inputs)


def _subject(name: str, make: Callable[[], nn.Module], inputs: Inputs) -> Subject:
    return Subject("small", name, functools.partial(prepared, name, [(make, inputs)]))


def _made(module: str, kind: str, options: dict[str, Any]) -> Any:
    def option(value: Any) -> Any:
        return _made(*value) if isinstance(value, tuple) and len(value) == 3 and isinstance(value[0], str) else value

    return getattr(importlib.import_module(module), kind)(**{name: option(value) for name, value in options.items()})


def _decoder(options: dict[str, Any]) -> nn.Module:
    import x_transformers

    layers = x_transformers.Decoder(dim=32, depth=2, heads=2, attn_dim_head=32, **options)
    made: nn.Module = x_transformers.TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers)
    return made


class _Spiking(nn.Module):
    """Its state is put back at the beginning of each run."""

    def __init__(self) -> None:
        from spikingjelly.activation_based import layer, neuron

        super().__init__()
        self.layers = nn.Sequential(layer.Linear(6, 8), neuron.LIFNode(), layer.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from spikingjelly.activation_based import functional

        functional.reset_net(self.layers)
        return torch.stack([self.layers(x) for _ in range(4)]).sum(0)


def _spiking() -> nn.Module:
    return _Spiking()


def _equivariant() -> nn.Module:
    from e3nn import o3

    return nn.Sequential(o3.Linear("4x0e+2x1o", "3x0e+2x1o"), o3.Linear("3x0e+2x1o", "2x0e+1x1o"), nn.Linear(5, 2))


def _liquid() -> nn.Module:
    from ncps.torch import CfC
    from ncps.wirings import AutoNCP

    made: nn.Module = CfC(4, AutoNCP(12, 3))
    return made


def _lightning() -> nn.Module:
    import lightning
    import torchmetrics

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layers = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))
            self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).softmax(-1)  # type: ignore[no-any-return]

    made: nn.Module = Module()
    return made


def _orthogonal() -> nn.Module:
    import geotorch

    made = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
    geotorch.orthogonal(made[0], "weight")
    geotorch.low_rank(made[2], "weight", 2)
    return made


class _Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))

    def forward(self, _: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.layers(y)  # type: ignore[no-any-return]


class _Solved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope, self.last = _Slope(), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torchdiffeq import odeint

        times = torch.tensor([0.0, 1.0])
        return self.last(odeint(self.slope, x, times, method="dopri5", rtol=1e-3, atol=1e-3)[-1])  # type: ignore[no-any-return]


def _solved() -> nn.Module:
    return _Solved()


ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 4, "target_modules": ["query", "value"]}),
    "dora": ("LoraConfig", {"r": 4, "target_modules": ["query", "value"], "use_dora": True}),
    "vera": ("VeraConfig", {"r": 4, "target_modules": ["query", "value"]}),
    "ia3": ("IA3Config", {"target_modules": ["key", "output.dense"], "feedforward_modules": ["output.dense"]}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
}


def _adapted(method: str) -> nn.Module:
    import peft
    import transformers

    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, vocab_size=64
    )
    kind, options = ADAPTERS[method]
    adapter = getattr(peft, kind)(task_type="SEQ_CLS", **options)
    made: nn.Module = peft.get_peft_model(transformers.BertForSequenceClassification(config), adapter)
    return made


class _Density(nn.Module):
    """The logarithm of a conditional density: a flow of zuko by itself gives a distribution."""

    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return self.flow(context).log_prob(x)  # type: ignore[no-any-return]


def _flow(name: str, options: dict[str, Any]) -> nn.Module:
    return _Density(_made("zuko.flows", name, {"features": 3, "context": 2, "hidden_features": (8,), **options}))


def _litgpt(options: dict[str, Any]) -> nn.Module:
    sizes = {"block_size": 32, "padded_vocab_size": 64, "vocab_size": 64, "n_layer": 3, "n_head": 4, "n_embd": 16}
    return _made("litgpt", "GPT", {"config": ("litgpt", "Config", {**sizes, **options})})
