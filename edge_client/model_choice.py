"""Define `ModelChoice`: which model, and how it is set up on this side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shared_hooks.errors import SpecError
from shared_hooks.models import ModelSpec, load_spec, pick_device, set_threads
from shared_hooks.showing import short

Inputs = tuple[tuple[Any, ...], Mapping[str, Any]]


@short
@dataclass(frozen=True, slots=True)
class ModelChoice:
    """Both sides must choose alike, or the handshake ends with Disagreement.

    `model` is a name or spec that `load_spec` takes, a `ModelSpec`, or an ``nn.Module`` (in eval mode, with its
    weights; then `model_id` is what the server calls it, and `example` its ``(args, kwargs)`` to plan on, if the
    server's spec has one).
    """

    model: str | ModelSpec | nn.Module = "digits"
    model_id: str | None = None
    """Replaces the spec's own."""
    example: Inputs | str | None = field(default=None, compare=False)
    """Replaces the spec's own: ``(args, kwargs)``, or text such as "1,3,224,224" or "1,16:int64" (`load_spec`), which
    the server then needs, too.
    """
    weights: tuple[str, ...] = ()
    """Files that replace those of the spec that `model` names."""
    selection: str | Path | None = None
    """A file of ``edge-client prune`` that replaces that of the spec that `model` names."""
    depth: int | None = None
    """How many levels of modules to descend; None: to the leaves."""
    device: str = "auto"
    threads: int | None = None
    """Threads inside one operation on the CPU, for the whole process. None: torch's choice."""
    only_head: int | str | None = None
    """A layer's id or name: only weights of heads that end there or before are loaded (docs/results/footprint.md)."""

    @classmethod
    def of(cls, model: str | ModelSpec | nn.Module | ModelChoice) -> ModelChoice:
        """Return ``model`` with defaults for everything else; a choice is returned unchanged."""
        return model if isinstance(model, ModelChoice) else cls(model)

    def spec(self) -> ModelSpec:
        """Return the model's spec. Raises SpecError for a module, UnknownModel, and what is wrong with the spec."""
        if isinstance(self.model, nn.Module):
            raise SpecError("a module has no spec")
        if isinstance(self.model, ModelSpec):
            return self.model
        example = self.example if isinstance(self.example, str) else None
        return load_spec(self.model, weights=self.weights or None, selection=self.selection, example=example)

    def with_spec(self, spec: ModelSpec) -> ModelChoice:
        """Return the same settings for the model of ``spec``, which names its own weights."""
        example = None if isinstance(self.example, str) else self.example
        return replace(self, model=spec, weights=(), selection=None, example=example)

    def set_up(self) -> torch.device:
        """Set torch's threads and return the device. Raises SpecError for a device that this machine lacks."""
        set_threads(self.threads)
        return pick_device(self.device)
