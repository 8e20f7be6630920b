"""What a model of transformers may be called with, likeliest first, from its configuration and its signature."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Make = Callable[[torch.Generator], dict[str, Any]]
LENGTH = 7
GRID = (1, 4, 4)
"""Frames, rows and columns of an image that comes as patches."""


def ways(model: nn.Module) -> Iterator[tuple[str, Make]]:
    """Pairs of a name and a maker of keyword arguments; which of them a model takes is found by trying."""
    facts = _Facts(model)
    names, main = facts.names, getattr(model, "main_input_name", "input_ids")
    if "input_ids" in names and "pixel_values" in names and "image_grid_thw" not in names:
        count = facts.image_tokens()
        if count:
            yield "text with picture tokens", facts.maker("pixel_values", "input_ids", image_tokens=count)
        yield "text and picture", facts.maker("input_ids", "attention_mask", "pixel_values")
    if "image_grid_thw" in names:
        yield (
            "text with patches",
            facts.maker("pixel_values", "input_ids", "image_grid_thw", image_tokens=facts.merged()),
        )
    if "grid_thw" in names:
        yield "patches", facts.maker("hidden_states", "pixel_values", "grid_thw")
    if "input_ids" in names and "input_features" in names:
        yield "text and audio", facts.maker("input_ids", "attention_mask", "input_features")
    if main == "input_ids" or "input_ids" in names:
        yield "text", facts.maker("input_ids", "attention_mask", "decoder_input_ids", "bbox")
        yield "text", facts.maker("input_ids", "decoder_input_ids")
    for layout in range(4):
        more = ["decoder_input_ids"] if "decoder_input_ids" in names else []
        if main in ("pixel_values", "pixel_values_videos", "input_values", "input_features", "audio_values"):
            yield f"{main} {layout}", facts.maker(main, *more, layout=layout)
    if "past_values" in names:
        series = [name for name in facts.series if name in names]
        yield "series", facts.maker(*series)
        yield "series", facts.maker("past_values")
    yield "required", facts.maker(*facts.required)


class _Facts:
    def __init__(self, model: nn.Module) -> None:
        self._model, self.config = model, getattr(model, "config", None)
        parameters = inspect.signature(model.forward).parameters
        self.names = set(parameters)
        self.required = [
            name
            for name, one in parameters.items()
            if one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
        ]
        text = self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config
        self.vocabulary = min(self._number("vocab_size", 100, text), 190)
        eos = getattr(text, "eos_token_id", None)
        self.eos = eos[0] if isinstance(eos, (list, tuple)) and eos else eos
        self.series = [
            "past_values", "past_time_features", "past_observed_mask", "future_values", "future_time_features",
            "static_categorical_features", "static_real_features",
        ]  # fmt: skip

    def _number(self, name: str, default: int, *configs: Any) -> int:
        """The first integer under a name in the configuration or its parts; of a list the first."""
        parts = [one for one in vars(self.config).values() if hasattr(one, "to_dict")]
        for config in (*configs, self.config, *parts):
            value = getattr(config, name, None)
            if isinstance(value, dict):
                value = value.get("height")
            if isinstance(value, (list, tuple)) and value:
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return default

    def maker(self, *wanted: str, image_tokens: int = 0, layout: int = 0) -> Make:
        """Makes those of the wanted arguments that the model has."""
        names = [name for name in wanted if name in self.names]

        def make(generator: torch.Generator) -> dict[str, Any]:
            rows = 1 if image_tokens or len({"pixel_values", "input_features"} & set(names)) else 2
            made = {name: self._value(name, generator, rows, layout) for name in names}
            if image_tokens:
                token = self._number("image_token_id", self._number("image_token_index", 0))
                made["input_ids"] = torch.cat([torch.full((1, image_tokens), token), made["input_ids"]], 1)
                made["attention_mask"] = torch.ones_like(made["input_ids"])
            return {name: value for name, value in made.items() if value is not None}

        return make

    def image_tokens(self) -> int:
        """How many tokens stand for one picture; 0 if that is not to be found out."""
        try:
            with torch.no_grad():
                found = self._model.get_image_features(self._value("pixel_values", torch.Generator(), 1, 0))
        except Exception:
            return 0
        found = getattr(found, "pooler_output", found)
        if isinstance(found, (list, tuple)):
            found = torch.cat([one.reshape(-1, one.shape[-1]) for one in found])
        if not isinstance(found, Tensor) or found.dim() < 2:
            return 0
        has_token = any(hasattr(self.config, name) for name in ("image_token_id", "image_token_index"))
        return found.numel() // found.shape[-1] if has_token else 0

    def merged(self) -> int:
        """How many tokens stand for a picture of `GRID` patches."""
        merge = self._number("spatial_merge_size", self._number("merge_size", 1), *self._vision())
        return math.prod(GRID) // merge**2

    def _vision(self) -> list[Any]:
        return [getattr(self.config, "vision_config", self.config)]

    def _patches(self) -> tuple[int, int]:
        """The shape of the patches of one picture."""
        vision = self._vision()
        channels = self._number(
            "in_channels", self._number("in_chans", self._number("num_channels", 3, *vision), *vision), *vision
        )
        return math.prod(GRID), channels * self._number("temporal_patch_size", 1, *vision) * self._number(
            "patch_size", 16, *vision
        ) ** 2

    def _value(self, name: str, generator: torch.Generator, rows: int, layout: int) -> Any:
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        def ints(*shape: int) -> Tensor:
            return torch.randint(5, max(6, self.vocabulary), shape, generator=generator)

        if name in ("image_grid_thw", "grid_thw"):
            return torch.tensor([GRID])
        if name in ("pixel_values", "hidden_states") and {"image_grid_thw", "grid_thw"} & self.names:
            return normal(*self._patches())
        if name == "input_ids":
            drawn = ints(rows, LENGTH)
            if isinstance(self.eos, int) and 0 <= self.eos < 256:
                drawn[:, -1] = self.eos
            return drawn
        if name == "attention_mask":
            mask = torch.ones(rows, LENGTH, dtype=torch.long)
            mask[rows - 1, 0] = 0 if rows > 1 else 1
            return mask
        if name == "decoder_input_ids":
            return ints(rows, 4)
        if name == "bbox":
            corner = torch.randint(0, 40, (rows, LENGTH, 2), generator=generator)
            return torch.cat([corner, corner + 20], -1)
        if name in ("pixel_values", "pixel_values_videos"):
            return self._pixels(normal, layout + (name == "pixel_values_videos"))
        if name in ("input_values", "audio_values"):
            bins = self._number("num_mel_bins", 16)
            long = self._number("max_length", 64)
            return [normal(1, 2000), normal(1, 1, 2000), normal(1, long, bins), normal(1, 16000)][layout]
        if name == "input_features":
            bins = self._number(
                "num_mel_bins", self._number("feature_size", self._number("input_feat_per_channel", 80))
            )
            long = 2 * self._number("max_source_positions", 32)
            return [normal(1, bins, long), normal(1, 64, bins), normal(1, bins, 64), normal(1, 64, 2 * bins)][layout]
        return self._of_series(name, normal, generator)

    def _pixels(self, normal: Any, layout: int) -> Tensor:
        channels = self._number("num_channels", self._number("in_channels", 3))
        size = self._number("image_size", self._number("img_size", 64))
        frames = self._number("num_frames", 4)
        shapes = [
            (1, channels, size, size), (1, frames, channels, size, size), (1, 2, channels, size, size),
            (1, channels, 128, 128), (1, channels, frames, size, size),
        ]  # fmt: skip
        return normal(*shapes[layout])

    def _of_series(self, name: str, normal: Any, generator: torch.Generator) -> Tensor | None:
        past = self._number("context_length", 32) + max(getattr(self.config, "lags_sequence", None) or [0])
        future = self._number("prediction_length", 8)
        channels = self._number("num_input_channels", self._number("input_size", 1))
        times = self._number("num_time_features", 0)
        tail = () if "past_time_features" in self.names and channels == 1 else (channels,)
        made = {
            "past_values": lambda: normal(2, past, *tail),
            "past_time_features": lambda: normal(2, past, times),
            "past_observed_mask": lambda: torch.ones(2, past, *tail),
            "future_values": lambda: normal(2, future, *tail),
            "future_time_features": lambda: normal(2, future, times),
            "hidden_states": lambda: normal(2, LENGTH, self._number("hidden_size", 32)),
            "inputs": lambda: torch.randint(0, 200, (1, 64), generator=generator),
        }
        return made[name]() if name in made else None
