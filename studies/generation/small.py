"""A class of transformers made small: four blocks, a window shorter than the text, weights that make tokens vary."""

from __future__ import annotations

import functools
import itertools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from studies.generation.blocks import decoder_blocks, generating_part
from studies.generation.mends import COMMON, PER_CLASS
from studies.generation.prompts import Prompts, prompts
from studies.generation.subject import Built, Subject
from studies.library.check import short
from studies.library.shrinking import changes
from studies.library.subject import NotUsable, equal_builds, seed_all

LAYERS = 4
WINDOW = 16
NEW_TOKENS = 64
FACTORS = (16, 8, 4, 2, 1)
NARROWEST = 32
MOST_PARAMETERS = 45_000_000
TRYING_SECONDS = 40.0
ENOUGH = 8
ENDS = ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id", "suppress_tokens", "begin_suppress_tokens")
EMBEDDING = re.compile(r"embed|wte|shared|lm_head|embd")
POSITION = re.compile(r"pos|wpe")
ATTENTION = re.compile(r"(q|k|query|key)(_proj|)\.weight|query_key_value")
WINDOWS = ("sliding_window", "attention_window_size", "attention_chunk_size")
PARTS = ("text_config", "decoder", "decoder_config", "thinker_config")


class Weights(NamedTuple):
    """What random weights are multiplied by, so that the next token hangs on the text: fresh ones say one word over and
    over, most of all where the embedding is the output as well.
    """

    matrices: float = 1.0
    embeddings: float = 1.0
    positions: float = 1.0
    attention: float = 1.0
    biases: float = 1.0
    seed: int = 0

    def of(self, name: str, dimensions: int) -> float:
        """For a parameter by its name."""
        if dimensions < 2:
            return self.biases if name.endswith("bias") else 1.0
        sharper = self.attention if ATTENTION.search(name) else 1.0
        if POSITION.search(name):
            return self.positions * sharper
        return sharper * (self.embeddings if EMBEDDING.search(name) else self.matrices)

    def __str__(self) -> str:
        return "weights x" + "/".join(f"{one:g}" for one in self)


PLAIN = Weights()
WEIGHTS = [
    Weights(2, 2),
    Weights(3, 3),
    *(
        Weights(*scales, biases=0.1, seed=seed)
        for seed in (0, 1)
        for scales in ((10, 0.3, 20, 4), (2, 0.3, 20, 4), (10, 1, 5, 4), (4, 0.3, 1, 4), (1, 0.3, 5, 1))
    ),
    Weights(6, 1),
    Weights(0.5, 0.5),
    Weights(10, 16, 20, 4),
]


def built(subject: Subject) -> Built:
    """The first way of making it small in which its own ``generate`` works. Raises NotUsable with what was tried."""
    import transformers

    cls = getattr(transformers, subject.name, None)
    if cls is None:
        raise NotUsable("no such class in this release, or what it needs is missing")
    deadline = time.process_time() + TRYING_SECONDS
    troubles: list[str] = []
    for label, config in _configurations(cls, subject):
        if time.process_time() > deadline:
            break
        try:
            return _built(cls, config, label)
        except NotUsable as error:
            troubles.append(f"{label}: {error}")
        except Exception as error:
            troubles.append(f"{label}: {short(error, 160)}")
    runs = [one for one in troubles if "generate" in one]  # a model that is made and does not generate says more
    raise NotUsable(" | ".join((runs or troubles)[:2]) or "no configuration")


def _configurations(cls: Any, subject: Subject) -> Iterator[tuple[str, Callable[[], Any]]]:
    try:
        default = cls.config_class()
    except Exception as error:
        raise NotUsable(f"no default configuration: {short(error, 200)}") from error
    factors = sorted(
        FACTORS, key=lambda factor: _width(default) // factor < NARROWEST
    )  # of each kind the smallest first
    own = PER_CLASS.get(subject.name, {})
    mends = [own | subject.overrides, *(one | subject.overrides for one in COMMON)]
    for factor, (number, mend), mixed in itertools.product(factors, enumerate(mends), (True, False)):
        make = functools.partial(_configuration, default, factor, mixed, mend, "causal" in subject.lists)
        yield f"1/{factor}{', mixed' * mixed}{f', mend {number}' * bool(number)}", make


def _text(config: Any) -> Any:
    """The part of a configuration that says how its decoder is."""
    return next((getattr(config, name) for name in PARTS if hasattr(getattr(config, name, None), "to_dict")), config)


def _width(config: Any) -> int:
    found = getattr(_text(config), "hidden_size", None)
    return found if isinstance(found, int) else NARROWEST * FACTORS[0]


def _configuration(default: Any, factor: int, mixed: bool, mend: dict[str, Any], causal: bool) -> Any:
    reported = changes(default, factor, {}, mixed=mixed, layers=LAYERS)
    part = _text(default)
    text = next((reported[name] for name in PARTS if getattr(default, name, None) is part), reported)
    for name in WINDOWS:
        value = text.get(name, getattr(part, name, None))
        if isinstance(value, int) and value > WINDOW:
            text[name] = WINDOW
    few = getattr(part, "num_hidden_layers", LAYERS)
    if isinstance(few, int) and few < LAYERS:
        text["num_hidden_layers"] = LAYERS
    text.update({name: value for name, value in mend.items() if _settable(part, name)})
    if causal and getattr(default, "is_decoder", None) is False and not default.is_encoder_decoder:
        reported["is_decoder"] = True
    config = type(default)(**reported)
    for one in [config, *(one for one in vars(config).values() if hasattr(one, "to_dict"))]:
        if getattr(one, "pad_token_id", 0) is None:
            one.pad_token_id = 0
    return config


def _settable(config: Any, name: str) -> bool:
    """Whether it is the configuration's own, and not worked out from others."""
    return hasattr(config, name) and not isinstance(getattr(type(config), name, None), property)


def _built(cls: Any, config: Callable[[], Any], label: str) -> Built:
    with torch.device("meta"):
        count = sum(p.numel() for p in cls(config()).parameters())
    if count > MOST_PARAMETERS:
        raise NotUsable(f"{count} parameters")
    first = _make(cls, config, PLAIN)
    way = prompts(first)
    some = functools.partial(first.generate, **way.batch(1, 0), max_new_tokens=4, do_sample=False)
    part = generating_part(first, some)
    blocks = decoder_blocks(first.get_submodule(part), some)
    weights, distinct = _weights(cls, config, way)
    label = f"{way.label}, {label}, {weights}"
    return Built(functools.partial(_make, cls, config, weights), way.batch, part, blocks, label, distinct, count)


def _make(cls: Any, config: Callable[[], Any], weights: Weights) -> nn.Module:
    """Nothing ends the text but its length."""
    model = equal_builds(lambda: cls(config()).float(), weights.seed)()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(weights.of(name, parameter.dim()))
    for module in model.modules():
        if hasattr(module, "generation_config"):
            _endless(module)
    return model


def _endless(model: Any) -> None:
    settings = model.generation_config
    for name in ENDS:
        setattr(settings, name, None)
    settings.pad_token_id = 0
    settings.max_length = None
    if getattr(model.config, "is_encoder_decoder", False) and settings.decoder_start_token_id is None:
        settings.decoder_start_token_id = 1


def _weights(cls: Any, config: Callable[[], Any], way: Prompts) -> tuple[Weights, int]:
    """The first with which greedy text has enough distinct tokens, else those with most; and how many."""
    best = (PLAIN, 0)
    for weights in WEIGHTS:
        model = _make(cls, config, weights)
        seed_all(5)
        with torch.no_grad():
            tokens = model.generate(**way.batch(1, 0), max_new_tokens=NEW_TOKENS, do_sample=False)
        distinct = len(set(tokens[0, -NEW_TOKENS:].tolist()))
        if distinct > best[1]:
            best = (weights, distinct)
        if distinct >= ENOUGH:
            break
    return best
