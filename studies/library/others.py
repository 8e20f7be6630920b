"""PyTorch Geometric, diffusers, segmentation-models-pytorch, and torchvision's detectors. None is a dependency."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from studies.library.check import memory_of, short
from studies.library.pictures import declare_operators
from studies.library.subject import Call, NotUsable, Prepared, Subject, equal_builds

Inputs = Callable[[torch.Generator], Call]


def prepared(label: str, makes: list[tuple[Callable[[], nn.Module], Inputs]]) -> Prepared:
    """The first of the ways to make and call it that works twice."""
    troubles = []
    for make, draw in makes:
        try:
            build = equal_builds(make)
            if memory_of(build()) != memory_of(build()):
                raise NotUsable("it has parameters that nothing initialises")
            model = build()

            def inputs(seed: int, draw: Inputs = draw) -> Call:
                return draw(torch.Generator().manual_seed(seed))

            with torch.no_grad():
                for seed in (0, 1):
                    args, kwargs = inputs(seed)
                    model(*args, **kwargs)
            return Prepared(label, model, build, inputs)
        except Exception as error:
            troubles.append(short(error, 100))
    raise NotUsable(" | ".join(troubles))


# -- graphs

NODES, WIDTH, EDGES = 12, 8, 40


def _edges() -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randint(0, NODES, (2, EDGES), generator=generator)


def _nodes(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(NODES, WIDTH, generator=generator)


def _mlp(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(width, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def graph_subjects() -> Iterator[Subject]:
    """Each layer of PyG, two of it with an activation between them, and its models of molecules and graphs."""
    import torch_geometric.nn as pyg
    import torch_geometric.nn.models as models

    for name in sorted(one for one in dir(pyg) if one.endswith("Conv")):
        yield Subject("pyg", name, functools.partial(_graph_layer, name))
    for name in sorted(one for one in dir(models) if one[0].isupper()):
        yield Subject("pyg", f"models.{name}", functools.partial(_graph_model, name))


class _TwoLayers(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.second = layers
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, *more: Any) -> torch.Tensor:
        x = self.first(x, edges, *more).relu()
        return self.last(self.second(x, edges, *more))  # type: ignore[no-any-return]


def _graph_layer(name: str) -> Prepared:
    import torch_geometric.nn as pyg

    kind = getattr(pyg, name)
    edges = _edges()
    arguments: list[tuple[Any, ...]] = [
        (WIDTH, WIDTH), (WIDTH,), (_mlp(),), (_mlp(2 * WIDTH),), (), (WIDTH, WIDTH, 2), (WIDTH, 2),
        (WIDTH, WIDTH, 3, 2), (2 * WIDTH,), (WIDTH, WIDTH, 2, 3, 2, 3), (WIDTH, 0.1, 0.5, 2),
    ]  # fmt: skip
    more: list[Callable[[torch.Generator], tuple[Any, ...]]] = [
        lambda g: (),
        lambda g: (torch.rand(EDGES, generator=g),),
        lambda g: (torch.randint(0, 2, (EDGES,), generator=torch.Generator().manual_seed(1)),),
        lambda g: (torch.randn(EDGES, WIDTH, generator=g),),
        lambda g: (torch.rand(EDGES, 1, generator=g),),
    ]
    keywords: list[dict[str, Any]] = [{}, {"heads": 1}, {"K": 2}, {"edge_dim": WIDTH}, {"num_layers": 2}]
    makes = [
        (
            functools.partial(lambda a, k: _TwoLayers([kind(*a, **k), kind(*a, **k)]), a, k),
            functools.partial(lambda m, g: ((_nodes(g), edges, *m(g)), {}), m),
        )
        for k in keywords
        for a in arguments
        for m in more
    ]
    return prepared(name, makes)


def _graph_model(name: str) -> Prepared:
    import torch_geometric.nn.models as models

    kind = getattr(models, name)
    edges = _edges()
    kinds = torch.randint(1, 9, (NODES,), generator=torch.Generator().manual_seed(2))
    arguments: list[tuple[Any, ...]] = [
        (WIDTH, WIDTH, 2, 4), (WIDTH, WIDTH, 4, 2), (WIDTH, 4), ([WIDTH, WIDTH, 4],), (), (WIDTH, WIDTH),
        (WIDTH, WIDTH, 4, WIDTH, 2, 2),
    ]  # fmt: skip
    keywords: list[dict[str, Any]] = [
        {},
        {"hidden_channels": 16, "num_filters": 16, "num_interactions": 2, "num_gaussians": 8},
        {"hidden_channels": 16, "out_channels": 2, "num_blocks": 1, "num_bilinear": 2, "num_spherical": 2,
         "num_radial": 3},
        {"hidden_channels": 16, "out_channels": 2, "num_blocks": 1, "int_emb_size": 4, "basis_emb_size": 4,
         "out_emb_channels": 4, "num_spherical": 2, "num_radial": 3},
        {"num_heads": 2, "num_layers": 1, "hidden_channels": 16},
    ]  # fmt: skip
    calls: list[Inputs] = [
        lambda g: ((_nodes(g), edges), {}),
        lambda g: ((_nodes(g),), {}),
        lambda g: ((kinds, torch.randn(NODES, 3, generator=g)), {}),
        lambda g: ((kinds, torch.randn(NODES, 3, generator=g), torch.zeros(NODES, dtype=torch.int64)), {}),
        lambda g: (
            (_nodes(g), edges, torch.randn(EDGES, WIDTH, generator=g), torch.zeros(NODES, dtype=torch.int64)),
            {},
        ),
    ]
    makes = [(functools.partial(kind, *a, **k), call) for k in keywords for a in arguments for call in calls]
    return prepared(name, makes)


# -- segmentation


def segmentation_subjects() -> Iterator[Subject]:
    """Every architecture of segmentation-models-pytorch, with encoders of its own and of timm."""
    declare_operators()
    import segmentation_models_pytorch as smp

    for name in sorted(smp.MODEL_ARCHITECTURES_MAPPING):
        for encoder in ("resnet18", "mobilenet_v2", "timm-mobilenetv3_small_075", "mit_b0"):
            yield Subject("segmentation", f"{name}.{encoder}", functools.partial(_segmentation, name, encoder))


def _segmentation(name: str, encoder: str) -> Prepared:
    import segmentation_models_pytorch as smp

    make = functools.partial(smp.create_model, name, encoder_name=encoder, encoder_weights=None, classes=3)
    return prepared(name, [(make, functools.partial(_picture, side)) for side in (64, 128, 224)])


def _picture(side: int, generator: torch.Generator) -> Call:
    return (torch.randn(1, 3, side, side, generator=generator),), {}


# -- diffusion

_BLOCKS = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
_UNET = {**_BLOCKS, "sample_size": 16, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
         "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 4}  # fmt: skip
_CONDITION = {**_BLOCKS, "sample_size": 16, "cross_attention_dim": 8, "attention_head_dim": 4,
              "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
              "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}  # fmt: skip
_VAE = {"block_out_channels": (8, 16), "norm_num_groups": 4, "latent_channels": 4,
        "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}  # fmt: skip
_DIT = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "in_channels": 4, "sample_size": 8,
        "patch_size": 2}  # fmt: skip


def _noisy(channels: int, side: int, generator: torch.Generator, **more: Any) -> Call:
    return (torch.randn(1, channels, side, side, generator=generator), torch.tensor([7])), more


def _conditioned(generator: torch.Generator) -> Call:
    args, _ = _noisy(4, 16, generator)
    return (*args, torch.randn(1, 5, 8, generator=generator)), {}


def _controlled(generator: torch.Generator) -> Call:
    args, _ = _conditioned(generator)
    return args, {"controlnet_cond": torch.randn(1, 3, 128, 128, generator=generator)}


def _tokens(width: int, generator: torch.Generator) -> Call:
    return (torch.randn(1, 4, 8, 8, generator=generator),), {
        "encoder_hidden_states": torch.randn(1, 5, width, generator=generator), "timestep": torch.tensor([7]),
    }  # fmt: skip


def _flux(generator: torch.Generator) -> Call:
    return (), {
        "hidden_states": torch.randn(1, 16, 4, generator=generator), "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": torch.randn(1, 5, 8, generator=generator),
        "pooled_projections": torch.randn(1, 8, generator=generator), "guidance": torch.tensor([3.0]),
        "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(5, 3),
    }  # fmt: skip


def _sd3(generator: torch.Generator) -> Call:
    args, kwargs = _tokens(16, generator)
    return args, {**kwargs, "pooled_projections": torch.randn(1, 8, generator=generator)}


def _of_diffusers() -> dict[str, tuple[dict[str, Any], Inputs]]:
    picture = functools.partial(_picture, 32)
    return {
        "UNet2DModel": (_UNET, functools.partial(_noisy, 3, 16)),
        "UNet2DConditionModel": (_CONDITION, _conditioned),
        "UNet1DModel": ({"sample_size": 32, "block_out_channels": (8, 16, 16), "extra_in_channels": 16,
                         "in_channels": 2, "out_channels": 2},
                        lambda g: ((torch.randn(1, 2, 256, generator=g), torch.tensor([7])), {})),
        "UNet3DConditionModel": ({**_BLOCKS, "sample_size": 16, "cross_attention_dim": 8, "attention_head_dim": 4,
                                  "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
                                  "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")},
                                 lambda g: ((torch.randn(1, 4, 2, 16, 16, generator=g), torch.tensor([7]),
                                             torch.randn(1, 5, 8, generator=g)), {})),
        "ControlNetModel": ({"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4,
                             "cross_attention_dim": 8, "attention_head_dim": 4,
                             "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
                             "conditioning_embedding_out_channels": (8, 16)}, _controlled),
        "AutoencoderKL": (_VAE, picture),
        "AsymmetricAutoencoderKL": ({"down_block_out_channels": (8, 16), "up_block_out_channels": (8, 16),
                                     "norm_num_groups": 4, "down_block_types": ("DownEncoderBlock2D",) * 2,
                                     "up_block_types": ("UpDecoderBlock2D",) * 2}, picture),
        "AutoencoderTiny": ({"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8),
                             "num_encoder_blocks": (1, 2), "num_decoder_blocks": (2, 1)}, picture),
        "AutoencoderKLTemporalDecoder": ({"block_out_channels": (32, 32), "latent_channels": 4,
                                          "down_block_types": ("DownEncoderBlock2D",) * 2, "layers_per_block": 1},
                                         lambda g: (_picture(32, g)[0], {"num_frames": 1})),
        "VQModel": ({"block_out_channels": (8, 16), "norm_num_groups": 4, "latent_channels": 4,
                     "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2},
                    picture),
        "DiTTransformer2DModel": ({**_DIT, "num_embeds_ada_norm": 10, "norm_num_groups": 4}, lambda g: (
            (torch.randn(1, 4, 8, 8, generator=g),), {"timestep": torch.tensor([7]),
                                                     "class_labels": torch.tensor([3])})),
        "PixArtTransformer2DModel": ({**_DIT, "cross_attention_dim": 16, "caption_channels": 8, "norm_num_groups": 4,
                                      "use_additional_conditions": False}, functools.partial(_tokens, 8)),
        "SD3Transformer2DModel": ({**_DIT, "caption_projection_dim": 16, "joint_attention_dim": 16,
                                   "pooled_projection_dim": 8, "out_channels": 4}, _sd3),
        "FluxTransformer2DModel": ({"in_channels": 4, "num_layers": 1, "num_single_layers": 1,
                                    "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 8,
                                    "pooled_projection_dim": 8, "axes_dims_rope": (4, 4, 8),
                                    "guidance_embeds": True}, _flux),
        "SanaTransformer2DModel": ({"in_channels": 4, "out_channels": 4, "num_attention_heads": 2,
                                    "attention_head_dim": 8, "num_layers": 2, "num_cross_attention_heads": 2,
                                    "cross_attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 8,
                                    "sample_size": 8}, functools.partial(_tokens, 8)),
        "AuraFlowTransformer2DModel": ({"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 1,
                                        "num_single_dit_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2,
                                        "joint_attention_dim": 8, "caption_projection_dim": 16, "out_channels": 4,
                                        "pos_embed_max_size": 16}, functools.partial(_tokens, 8)),
        "AutoencoderDC": ({"latent_channels": 4, "encoder_block_out_channels": (8, 16),
                           "decoder_block_out_channels": (8, 16), "encoder_layers_per_block": (1, 1),
                           "decoder_layers_per_block": (1, 1), "encoder_block_types": "ResBlock",
                           "decoder_block_types": "ResBlock", "encoder_qkv_multiscales": ((), ()),
                           "decoder_qkv_multiscales": ((), ()), "attention_head_dim": 4}, picture),
        "Kandinsky3UNet": ({"time_embedding_dim": 16, "groups": 4, "attention_head_dim": 4, "layers_per_block": 1,
                            "block_out_channels": (8, 16), "cross_attention_dim": (8, 8),
                            "encoder_hid_dim": 8}, _conditioned),
        "StableCascadeUNet": ({"in_channels": 4, "out_channels": 4, "timestep_ratio_embedding_dim": 8,
                               "conditioning_dim": 8, "block_out_channels": (8,), "num_attention_heads": (2,),
                               "down_num_layers_per_block": (1,), "up_num_layers_per_block": (1,),
                               "down_blocks_repeat_mappers": (1,), "up_blocks_repeat_mappers": (1,),
                               "block_types_per_layer": (("SDCascadeResBlock", "SDCascadeTimestepBlock"),),
                               "clip_text_pooled_in_channels": 8},
                              lambda g: ((torch.randn(1, 4, 8, 8, generator=g), torch.tensor([0.5]),
                                          torch.randn(1, 1, 8, generator=g)), {})),
    }  # fmt: skip


def diffusion_subjects() -> Iterator[Subject]:
    """Networks of diffusers, from small configurations."""
    declare_operators()
    for name in sorted(_of_diffusers()):
        yield Subject("diffusers", name, functools.partial(_diffusion, name))


def _diffusion(name: str) -> Prepared:
    import diffusers

    configuration, draw = _of_diffusers()[name]
    return prepared(name, [(functools.partial(getattr(diffusers, name), **configuration), draw)])


# -- detection


def detection_subjects() -> Iterator[Subject]:
    """torchvision's detectors, each on one small picture; what its extension would do runs in Python."""
    declare_operators()
    import torchvision

    _declare_kernels()
    for name in sorted(torchvision.models.list_models(module=torchvision.models.detection)):
        yield Subject("detection", name, functools.partial(_detection, name))


_kernels: Any = None


def _declare_kernels() -> None:
    """What the extension would have: overlapping boxes are left out, by Python."""
    global _kernels
    if _kernels is not None:
        return
    import torchvision

    def suppressed(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
        left, kept = scores.argsort(descending=True, stable=True), []
        while len(left):
            kept.append(left[0])
            overlaps = torchvision.ops.box_iou(boxes[left[:1]], boxes[left[1:]])[0]
            left = left[1:][overlaps <= threshold]
        return torch.stack(kept) if kept else torch.zeros(0, dtype=torch.int64)

    _kernels = torch.library.Library("torchvision", "IMPL")
    _kernels.impl("nms", suppressed, "CPU")
    torchvision.extension._assert_has_ops = lambda: None
    torchvision.ops.boxes._assert_has_ops = lambda: None


def _detection(name: str) -> Prepared:
    import torchvision

    more = {"min_size": 64, "max_size": 96} if "rcnn" in name or "retinanet" in name or "fcos" in name else {}
    make = functools.partial(
        torchvision.models.get_model, name, weights=None, weights_backbone=None, num_classes=3, **more
    )

    def draw(generator: torch.Generator) -> Call:
        return ([torch.rand(3, 64, 64, generator=generator)],), {}

    return prepared(name, [(make, draw)])
