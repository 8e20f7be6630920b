"""timm and torchvision: one or two small models of every module of theirs. Neither is a dependency of the project."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from studies.library.check import short
from studies.library.subject import Call, NotUsable, Prepared, Subject, equal_builds

SMALL = "test_ atto femto pico zepto nano tiny xxs xxtiny micro mini _xs small _s 18 b0 050 16 0".split()
MOST_PARAMETERS = 40_000_000
MOST_OF_TORCHVISION = 140_000_000  # of some files nothing is smaller


def timm_subjects(each: int = 1) -> Iterator[Subject]:
    """The smallest model, by its name, of every module of timm."""
    declare_operators()
    import timm

    for module in timm.list_modules():
        names = sorted(timm.list_models(module=module), key=lambda name: (_size(name), len(name), name))
        for name in names[:each]:
            yield Subject("timm", f"{module}.{name}", functools.partial(_timm, name))


def _size(name: str) -> int:
    return next((place for place, mark in enumerate(SMALL) if mark in name), len(SMALL))


def _timm(name: str) -> Prepared:
    import timm

    _check_size(functools.partial(timm.create_model, name, pretrained=False, num_classes=10))
    troubles = []
    size = timm.get_pretrained_cfg(name)
    default = size.input_size if size is not None else (3, 224, 224)
    for more, shape in (
        ({"img_size": 64}, (3, 64, 64)),
        ({}, (3, 64, 64)),
        ({"img_size": 96}, (3, 96, 96)),
        ({}, (3, 96, 96)),
        ({"img_size": 128}, (3, 128, 128)),
        ({}, (3, 128, 128)),
        ({}, default),
    ):
        make = functools.partial(timm.create_model, name, pretrained=False, num_classes=10, **more)
        try:
            return _running(f"{name} {shape[-1]}", make, shape)
        except Exception as error:
            troubles.append(short(error, 120))
    raise NotUsable(" | ".join(troubles))


def vision_subjects() -> Iterator[Subject]:
    """The two smallest models of every file of torchvision but the quantisable twins and detection (see below)."""
    declare_operators()
    import torchvision

    seen: dict[str, int] = {}

    def parameters(name: str) -> int:
        return min(one.meta["num_params"] for one in torchvision.models.get_model_weights(name))

    for name in sorted(torchvision.models.list_models(), key=lambda name: (parameters(name), name)):
        place = inspect.getmodule(torchvision.models.get_model_builder(name)).__name__.removeprefix(
            "torchvision.models."
        )
        if place.startswith(("quantization", "detection")) or seen.setdefault(place, 0) >= 2:
            continue
        seen[place] += 1
        yield Subject("torchvision", name, functools.partial(_torchvision, name, place))


_library: Any = None


def declare_operators() -> None:
    """Make torchvision importable, which timm and parts of transformers use where it is there.

    It gives shapes to operators of its extension, and its import ends if that did not load. Where the extension is of
    another build of torch, the operators are declared here without a kernel; only detection would call them.
    """
    global _library
    if _library is not None:
        return
    try:
        import torchvision
    except RuntimeError:
        import sys

        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        _library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    else:
        _library = torchvision


def _torchvision(name: str, place: str) -> Prepared:
    import torchvision

    video = place.startswith("video")
    shapes = (
        [(3, 8, 64, 64), (3, 16, 224, 224)] if video else [(3, 64, 64), (3, 128, 128), (3, 224, 224), (3, 299, 299)]
    )
    pairs = place.startswith("optical_flow")
    if not place.startswith(("inception", "googlenet")):
        _check_size(functools.partial(torchvision.models.get_model, name), MOST_OF_TORCHVISION)
    troubles = []
    for shape in shapes:
        given: dict[str, Any] = {"weights": None}
        if "segmentation" in place:
            given["weights_backbone"] = None
        if not pairs:
            given["num_classes"] = 10
        if "vision_transformer" in place or "maxvit" in place:
            given.update({"image_size": shape[-1]} if "vision" in place else {"input_size": shape[-2:]})
        if name in ("googlenet", "inception_v3"):
            given["init_weights"] = False
        make = functools.partial(torchvision.models.get_model, name, **given)
        try:
            return _running(f"{name} {shape[-1]}", make, shape, twice=pairs)
        except Exception as error:
            troubles.append(short(error, 120))
    raise NotUsable(" | ".join(troubles))


def _check_size(make: Any, most: int = MOST_PARAMETERS) -> None:
    count = None
    with contextlib.suppress(Exception), torch.device("meta"):
        count = sum(p.numel() for p in make().parameters())
    if count is not None and count > most:
        raise NotUsable(f"{count} parameters")


def _running(label: str, make: Any, shape: tuple[int, ...], *, twice: bool = False) -> Prepared:
    build = equal_builds(make)
    model: nn.Module = build()

    def inputs(seed: int) -> Call:
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn((1, *shape), generator=generator) for _ in range(1 + twice)]
        return tuple(drawn), {}

    with torch.no_grad():
        for seed in (0, 1):
            model(*inputs(seed)[0])
    return Prepared(label, model, build, inputs)
