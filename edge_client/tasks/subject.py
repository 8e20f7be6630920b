"""What people have - a name, a file, a module; files, arrays - as a model with inputs that tasks can work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from edge_client.credentials import Credentials
from edge_client.given import Given, given
from edge_client.model_choice import Inputs, ModelChoice
from edge_client.settings import OWN, server_of
from edge_client.survey.gather import models_of
from edge_client.survey.loaded import Loaded
from edge_client.survey.loading import fails_on
from shared_hooks import WrappedModel
from shared_hooks.config import resolve
from shared_hooks.errors import IsthmusError, SpecError
from shared_hooks.models import ModelSpec
from shared_hooks.models.example import inputs_of_text, to_device

Model = str | Path | ModelSpec | nn.Module | ModelChoice
"""A name, a TOML file, "module:callable"; a module in eval mode; or a choice, with device, threads and weights."""


NO_EXAMPLE: Final = "no example input to plan on; give one with --input, in Python as inputs"


@dataclass(frozen=True)
class ModuleSpec(ModelSpec):
    """A module that somebody has, where a spec is asked for."""

    module: nn.Module | None = None

    def load_model(self, device: torch.device | str = "cpu") -> nn.Module:
        """The module itself, moved to ``device``."""
        assert self.module is not None
        return self.module.to(device)


@dataclass(frozen=True)
class Subject:
    """A model, and what is to run through it. ``server``: an address, or None for one of our own or none."""

    choice: ModelChoice
    spec: ModelSpec
    inputs: Sequence[Given]

    @property
    def by_name(self) -> bool:
        """Whether another process can load it, too."""
        return isinstance(self.choice.model, str)

    @property
    def file(self) -> str | None:
        """The first input, if it is a file."""
        item = self.inputs[0].item if self.inputs else None
        return None if item is None else str(item.path)

    def check_factory(self) -> None:
        """SpecError for a wrong name of it."""
        if not isinstance(self.spec, ModuleSpec):
            resolve(self.spec.factory, self.spec.folder, f"{self.spec.origin}: factory")

    def load(self, *, on_inputs: bool = False) -> Loaded:
        """The model, wrapped and planned: on the spec's example, which is what a server measures, too; without one, or
        with ``on_inputs``, on the first input that can be. Raises what reading or planning raises, SpecError for
        nothing to plan on.
        """
        device = self.choice.set_up()
        example = None if on_inputs and self.inputs else self.spec.example(device)
        if example is None and not self.inputs:
            self.check_factory()
            raise SpecError(f"{self.spec.origin}: {NO_EXAMPLE}")
        wrapped = WrappedModel(self.spec.load_model(device), depth=self.choice.depth)
        problem: IsthmusError | None = None
        for each in [None] if example is not None else self.inputs:
            inputs: Inputs | None = None
            try:
                args, kwargs = example if each is None and example is not None else each.read(self.spec)  # type: ignore[union-attr]
                inputs = args, kwargs = to_device(args, device), to_device(kwargs, device)
                return Loaded(self.choice, self.spec, wrapped, args, kwargs, wrapped.plan(*args, **kwargs).digest)
            except IsthmusError as error:
                problem = problem or error
            except Exception as error:
                wrapped.detach()
                name = None if each is None else each.name
                raise fails_on(self.spec, name, error, wrapped.model, inputs) from error
            except BaseException:
                wrapped.detach()
                raise
        wrapped.detach()
        assert problem is not None
        raise problem


def address_of(server: str | None) -> str | None:
    """The server that is meant, by the one default of all (`edge_client.settings`): HOST:PORT, "own", or None.

    Raises SpecError for what is no address.
    """
    try:
        return server_of(server, option="server").address
    except SpecError as error:
        if server is None:
            raise
        raise SpecError(
            f'{error}; the server comes first, then the model (None, "own" or "none" without one)'
        ) from None


def subject_of(
    model: Model, inputs: Any = None, server: str | None = None, credentials: Credentials | None = None
) -> Subject:
    """Loads nothing. A module without a `model_id` is the one model that ``server`` serves.

    Raises SpecError, UnknownModel, InputMismatch.
    """
    choice = ModelChoice.of(str(model) if isinstance(model, Path) else model)
    items = given(inputs)
    if not isinstance(choice.model, nn.Module):
        if not isinstance(choice.model, (str, ModelSpec)):
            raise SpecError(
                "a model is a name, a TOML file, a torch.nn.Module, a ModelSpec or a ModelChoice, not "
                f"{type(choice.model).__name__}"
            )
        spec = choice.spec()
        return Subject(choice, spec if choice.model_id is None else replace(spec, model_id=choice.model_id), items)
    if choice.model.training:
        raise SpecError("the module is in training mode: call its eval() first")
    name = choice.model_id or (_served(server, credentials) if server not in (None, OWN) else None)
    spec = ModuleSpec(
        name or type(choice.model).__name__,
        "the given module",
        Path.cwd(),
        f"{type(choice.model).__module__}:{type(choice.model).__qualname__}",
        module=choice.model,
    )
    held = next((one for one in items if one.item is None), None)
    example = inputs_of_text(choice.example) if isinstance(choice.example, str) else choice.example
    if example is not None:
        spec = replace(spec, _example=lambda: (example[0], dict(example[1])))
    elif held is not None:
        spec = replace(spec, _example=partial(held.read, spec))
    return Subject(replace(choice, model=spec, weights=(), selection=None, model_id=None, example=None), spec, items)


def _served(server: str | None, credentials: Credentials | None) -> str | None:
    assert server is not None
    names = [one.model_id for one in models_of(server, credentials)]
    if len(names) > 1:
        raise SpecError(
            f"{server} serves {', '.join(names)}: say which of them the module is: ModelChoice(module, model_id=...)"
        )
    return names[0] if names else None
