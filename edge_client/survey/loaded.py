"""A model with an input to plan on, as plans, profiles and sweeps need it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edge_client.model_choice import ModelChoice
from shared_hooks import WrappedModel
from shared_hooks.models import ModelSpec
from shared_hooks.showing import short


@short
@dataclass(frozen=True, slots=True)
class Loaded:
    """A wrapped model that is planned on one input."""

    choice: ModelChoice
    """What it was made of."""
    spec: ModelSpec
    wrapped: WrappedModel
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    plan_digest: str
