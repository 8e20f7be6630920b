"""What is split: classes of transformers that generate, as they are listed there by what they do."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

HEADS = {
    "causal": "CAUSAL_LM",
    "sequence-to-sequence": "SEQ_TO_SEQ_CAUSAL_LM",
    "speech": "SPEECH_SEQ_2_SEQ",
    "image-text": "IMAGE_TEXT_TO_TEXT",
}
PRELOADED = ("LlamaForCausalLM", "WhisperForConditionalGeneration", "LlavaForConditionalGeneration", "BertLMHeadModel")


@dataclass(frozen=True)
class Subject:
    """``name``: of a class of transformers; ``lists``: those of `HEADS` that have it. ``overrides``: settings of its
    text configuration. ``key``: what its record is called.
    """

    name: str
    model_type: str
    lists: tuple[str, ...]
    overrides: dict[str, Any] = field(default_factory=dict)
    key: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.key or self.name)


@dataclass(frozen=True)
class Built:
    """A model that generates. ``build()`` gives equal ones; ``inputs(rows, seed)`` what `generate` is given: rows that
    differ in length if there are several, padded; ``part``: the path of what is called for a step, mostly "";
    ``blocks``: those of its decoder, below that; ``label`` says how it was made small; ``distinct``: how many tokens it
    uses in 64.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], dict[str, Any]]
    part: str
    blocks: list[str]
    label: str
    distinct: int
    parameters: int


def preload() -> None:
    """Import what every forked process would spend seconds on."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    for name in PRELOADED:
        getattr(transformers, name)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)


def subjects() -> list[Subject]:
    """Each class once, by name; where several model types share one, with the first."""
    from transformers.models.auto import modeling_auto

    found: dict[str, tuple[str, list[str]]] = {}
    for name, head in HEADS.items():
        for model_type, classes in getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES").items():
            for one in [classes] if isinstance(classes, str) else classes:
                lists = found.setdefault(one, (model_type, []))[1]
                if name not in lists:
                    lists.append(name)
    return [Subject(one, model_type, tuple(lists)) for one, (model_type, lists) in sorted(found.items())]
