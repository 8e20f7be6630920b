"""A model with an input to plan on, as plans, profiles and sweeps need it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shared_hooks import WrappedModel
    from shared_hooks.models import ModelSpec


@dataclass(frozen=True, slots=True)
class Loaded:
    """A wrapped model that is planned on one input."""

    spec: ModelSpec
    wrapped: WrappedModel
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    plan_digest: str
