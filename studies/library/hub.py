"""The architectures of transformers: every model type it knows, from its default configuration made small."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from studies.library.check import short
from studies.library.hub_inputs import Make, ways
from studies.library.pictures import declare_operators
from studies.library.shrinking import changes
from studies.library.subject import NotUsable, Prepared, Subject, equal_builds

PRELOADED = (
    "LlamaForCausalLM",
    "WhisperForConditionalGeneration",
    "ViTModel",
    "MixtralModel",
    "DetrModel",
    "ClvpModel",
)
FACTORS = (16, 8, 4, 2, 1)
MOST_PARAMETERS = 30_000_000
TRYING_S = 8.0
HEADS = """CAUSAL_LM MASKED_LM SEQ_TO_SEQ_CAUSAL_LM SPEECH_SEQ_2_SEQ IMAGE_TEXT_TO_TEXT IMAGE_CLASSIFICATION
SEQUENCE_CLASSIFICATION TOKEN_CLASSIFICATION QUESTION_ANSWERING OBJECT_DETECTION SEMANTIC_SEGMENTATION
UNIVERSAL_SEGMENTATION DEPTH_ESTIMATION AUDIO_CLASSIFICATION AUDIO_XVECTOR CTC VIDEO_CLASSIFICATION
MASKED_IMAGE_MODELING
ZERO_SHOT_IMAGE_CLASSIFICATION TIME_SERIES_PREDICTION BACKBONE PRETRAINING IMAGE_TO_IMAGE KEYPOINT_DETECTION
TEXT_TO_WAVEFORM""".split()


def subjects(*, cache: bool) -> Iterator[Subject]:
    """One a model type. ``cache``: as configured, with caches of keys and values where there are any; else without."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with contextlib.suppress(ImportError):
        declare_operators()
    import transformers
    from transformers.models.auto import modeling_auto

    for name in PRELOADED:  # seconds that every forked worker would spend again
        getattr(transformers, name)
    transformers.logging.set_verbosity_error()
    known: dict[str, list[str]] = {}
    for mapping in ["MODEL_MAPPING_NAMES", *(f"MODEL_FOR_{head}_MAPPING_NAMES" for head in HEADS)]:
        for model_type, classes in getattr(modeling_auto, mapping).items():
            for name in classes if isinstance(classes, (tuple, list)) else [classes]:
                if name not in known.setdefault(model_type, []):
                    known[model_type].append(name)
    for model_type, classes in known.items():
        # the head is drawn, so that a sweep sees all kinds; the others are there for when it cannot be used
        first = int(hashlib.blake2b(model_type.encode()).hexdigest(), 16) % len(classes)
        order = tuple([*classes[first:], *classes[:first]][:3])
        family = "transformers-cache" if cache else "transformers"
        yield Subject(family, model_type, functools.partial(_prepare, model_type, order, cache))


@dataclass(frozen=True)
class Small:
    """How a configuration is made small: see `shrinking.changes`. ``cache``: as configured, else without."""

    factor: int
    mixed: bool
    cache: bool


def _prepare(model_type: str, classes: tuple[str, ...], cache: bool) -> Prepared:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    deadline = time.process_time() + TRYING_S
    try:
        default = CONFIG_MAPPING[model_type]()
    except Exception as error:
        raise NotUsable(f"no default configuration: {short(error, 200)}") from error
    if cache and not _caches(default):
        raise NotUsable("keeps no cache")
    troubles: list[str] = []
    for name in classes:
        cls = getattr(transformers, name, None)
        if cls is None:
            continue
        for factor, mixed in itertools.product(FACTORS, (True, False)):
            if time.process_time() > deadline:
                break
            try:
                return _try(cls, default, Small(factor, mixed, cache))
            except Exception as error:
                troubles.append(f"{name}/{factor}: {short(error, 160)}")
    raise NotUsable(" | ".join(troubles[:3]) or "no class")


def _caches(config: Any) -> bool:
    parts = [config, *(one for one in vars(config).values() if hasattr(one, "to_dict"))]
    return any(getattr(one, "use_cache", False) for one in parts)


def _try(cls: Any, default: Any, small: Small) -> Prepared:
    config = _config(default, small)
    with contextlib.suppress(Exception), torch.device("meta"):
        count = sum(p.numel() for p in cls(config).parameters())
        if count > MOST_PARAMETERS:
            config = None
    if config is None:
        raise NotUsable(f"{count} parameters")

    def make() -> nn.Module:
        built: nn.Module = cls(_config(default, small))
        return built.float()

    build = equal_builds(make)
    model = build()
    troubles = []
    for label, way in ways(model):
        try:
            with torch.no_grad():
                model(**way(torch.Generator().manual_seed(0)))
                model(**way(torch.Generator().manual_seed(1)))
        except Exception as error:
            troubles.append(f"{label}: {short(error, 120)}")
        else:
            label = f"{cls.__name__}, {label}, 1/{small.factor}"
            return Prepared(label, model, build, functools.partial(_call, way))
    raise NotUsable("; ".join(troubles[:2]))


def _call(way: Make, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (), way(torch.Generator().manual_seed(seed))


def _config(default: Any, small: Small) -> Any:
    config = type(default)(**changes(default, small.factor, {}, mixed=small.mixed))
    for part in [config, *(one for one in vars(config).values() if hasattr(one, "to_dict"))]:
        if not small.cache and getattr(part, "use_cache", False):
            part.use_cache = False
        if getattr(part, "pad_token_id", 0) is None:
            part.pad_token_id = 0
    return config
