"""The parts of a multimodal model by what they are for: vision, audio, fusion, language, head.

Found by the words in a module's name and in the name of its type; a module belongs to the group of the outermost
ancestor that has one, so that a projection inside a vision encoder is vision. `RULES` may be extended with `add`.
"""

from __future__ import annotations

import re

from torch import nn

from shared_hooks.modules import ROOT, walk

RULES: dict[str, tuple[re.Pattern[str], re.Pattern[str]]] = {}
"""Group -> (pattern for the last part of a name, pattern for a type's name), both searched in lower case."""


def add(group: str, names: str, types: str = "(?!)") -> None:
    """Add a group, or replace one: regular expressions for names and for the names of types."""
    RULES[group] = (re.compile(names), re.compile(types))


add("vision", r"^(vision|visual|image|pixel|vit$)", r"^(?!.*text).*(vision|visual|image.?encoder)(?!.*2seq)")
add("audio", r"^(audio|speech|acoustic|wave)", r"^(?!.*text).*(audio|speech)")
add(
    "fusion",
    r"(fusion|cross_?modal|multi_?modal|connector|projector|q_?former|perceiver|resampler)",
    r"(fusion|crossmodal|multimodal|connector|projector|qformer|perceiver|resampler)",
)
add("language", r"^(text|language|llm|bert|roberta)", r"(text|language)(model|encoder|decoder|transformer)")
add(
    "head", r"(^|_)(head|classifier|score|fc|logits?)($|_)|^classifier|(visual|text|vision|audio)_projection$", r"head$"
)


def find(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Group -> names of its modules, in definition order; groups without a module are left out."""
    found: dict[str, list[str]] = {}
    owner: dict[str, str] = {}
    for module, info in walk(model, None).items():
        if info.path == ROOT:
            continue
        parent, _, last = info.path.rpartition(".")
        group = owner.get(parent) or _group(last.lower(), type(module).__name__.lower())
        if group is not None:
            owner[info.path] = group
            found.setdefault(group, []).append(info.path)
    return {group: tuple(names) for group, names in found.items()}


def _group(name: str, kind: str) -> str | None:
    # projections are named after what they project: the more special rules first
    for group in ("head", "fusion", *RULES):
        names, _ = RULES.get(group, (None, None))
        if names is not None and names.search(name):
            return group
    return next((group for group, (_, types) in RULES.items() if types.search(kind)), None)
