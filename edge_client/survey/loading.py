"""Model, inputs and cut from words; errors name the word, its option on the command line, and its neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from edge_client.core import ClientCore
from edge_client.inputs.kinds import unfit
from edge_client.model_choice import Inputs, ModelChoice
from edge_client.screen.text import one_line
from edge_client.sources import Item
from edge_client.sources.cameras import is_camera, without_password
from edge_client.sources.videos import SUFFIXES as VIDEO_SUFFIXES
from edge_client.spoken import CLOUD_FILE, CLOUD_ONLY, EDGE_ONLY, WORDS, either, option
from shared_hooks import WrappedModel
from shared_hooks.config import resolve
from shared_hooks.errors import CutRefused, InputMismatch, IsthmusError, ModelFailed, SpecError, UnknownLayer, near_path
from shared_hooks.models import InputItem, ModelSpec, find_inputs
from shared_hooks.models.inputs import to_device
from shared_hooks.modules import walk
from shared_hooks.planning import LayerInfo, Plan, blocks
from shared_hooks.showing import short

AnItem = TypeVar("AnItem", bound=Item)


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

    @property
    def cuts(self) -> list[LayerInfo]:
        """The places for a cut, of the latest plan, that the choice's `depth` shows."""
        return list(self.plan.within(self.choice.depth))

    @property
    def plan(self) -> Plan:
        """The latest, on its input."""
        return self.wrapped.plan(*self.args, **self.kwargs)


def name_of(model_id: str) -> str:
    """The id of a served model without its version: "net:2" is a version of "net"."""
    return model_id.partition(":")[0]


def load(choice: ModelChoice, inputs: Sequence[str] | None = None) -> Loaded:
    """The model, planned on its example, or on the first of ``inputs`` (--input) where they are given."""

    spec, device = choice.spec(), choice.set_up()
    args, kwargs = example_of(choice, inputs)
    wrapped = WrappedModel(spec.load_model(device))
    try:
        return Loaded(choice, spec, wrapped, args, kwargs, wrapped.plan(*args, **kwargs).digest)
    except BaseException as error:
        wrapped.detach()
        if isinstance(error, IsthmusError) or not isinstance(error, Exception):
            raise
        raise fails_on(spec, inputs[0] if inputs else None, error, wrapped.model, (args, kwargs)) from error


def fails_on(
    spec: ModelSpec, name: str | None, error: Exception, model: nn.Module, inputs: Inputs | None
) -> IsthmusError:
    """The model itself raised ``error`` on what it should be planned on: the input ``name``; None: the example.

    ``inputs``: what it was called with; None: reading the input raised.
    """
    if name is not None and inputs is not None and (wrong := unfit(model, inputs, spec.example(), error)) is not None:
        return InputMismatch(f"{name}: {wrong}")
    said, what = one_line(f"{type(error).__name__}: {error}"), name or "its example"
    others = either("--example and --input say another", "ModelChoice(..., example=...) and inputs say another")
    return ModelFailed(f"{spec.origin}: the model fails on {what}: {said} ({others})")


def example_of(choice: ModelChoice, inputs: Sequence[str] | None = None) -> Inputs:
    """What to plan on, on the model's device: the first of ``inputs`` (--input), else the spec's example."""
    spec, device = choice.spec(), choice.set_up()
    call = spec.preprocess(find(inputs)[0]) if inputs else spec.example(device)
    if call is None:
        resolve(spec.factory, spec.folder, f"{spec.origin}: factory")  # a wrong name is to be reported first
        raise SpecError(
            f"{spec.origin}: no example input to plan on; give one with "
            + either("--example 1,3,224,224 or --input", "ModelChoice(..., example='1,3,224,224')")
        )
    return to_device(call[0], device), to_device(call[1], device)


def find(patterns: Sequence[str]) -> list[InputItem]:
    """The files of --input; SpecError for one that is not there."""

    for word in patterns:
        if is_camera(word) or Path(word).suffix.lower() in VIDEO_SUFFIXES:
            raise SpecError(
                f"--input: {without_password(word)}: videos and cameras are inputs of run; give a file here"
            )
    try:
        return find_inputs(patterns)
    except InputMismatch as error:
        raise SpecError(f"--input: {error}") from error


def first_readable(spec: ModelSpec, items: Sequence[AnItem]) -> AnItem:
    """The first input that ``spec`` can read, for what takes one of many; the first where none can be."""
    for item in items:
        try:
            spec.preprocess(item)
        except Exception:  # whatever a spec's own code raises is reported at the input's place
            continue
        return item
    return items[0]


def cut_for(client: ClientCore, split: str, items: Sequence[Item]) -> int | str:
    """--split for a prepared client, before anything is sent: on the example's plan, else on the first that an input
    gives.

    Raises UnknownLayer, CutRefused. Words that are no cut, such as "edge-only", are returned as they are.
    """

    if split in (EDGE_ONLY, CLOUD_ONLY, CLOUD_FILE):
        return split
    if client.spec is not None and client.spec.example() is None:
        for item in items:
            try:
                args, kwargs = client.spec.preprocess(item)
                client.wrapped.plan(*to_device(args, client.device), **to_device(kwargs, client.device))
            except Exception:  # whatever preprocessing or the model raises is reported at the input's place
                continue
            break
        else:
            return split
    return cut_of(split, client.wrapped)


def cut_of(text: str, wrapped: WrappedModel, name: str | None = None) -> int | str:
    """A cut as the engine takes it: "input", a name, or a layer's id. ``name``: what messages call it; None: the
    option or keyword `split`, which takes more words. Raises UnknownLayer, CutRefused.

    A name stays a name: on another path through the model the layer has another id.
    """
    if text == "input":
        return text
    called, words = (option("split"), WORDS) if name is None else (name, ())
    try:
        found = wrapped.resolve(text)
    except UnknownLayer as error:
        if _unused(text, wrapped):
            return text
        layers = wrapped.layers
        if text.lstrip("-").isdigit():
            raise UnknownLayer(f"{called} {text}: layer ids are 0 to {len(layers) - 1}") from error
        names = [one.name for one in wrapped.cuts]
        known = [*names, *blocks(names), "input", *words]
        raise UnknownLayer(
            f'{called} {text}: no such layer or block, and not "input".{near_path(text, known)} '
            "(edge-client layers lists them)"
        ) from error
    if found is None:
        return "input"
    if not found.can_split:
        number = found.layer_id
        where = f"layer {number}{'' if text in (found.name, str(number)) else f' ({found.name})'}"
        where = f"block {found.name}" if found.is_block else where
        raise CutRefused(f"{called} {text}: the model cannot be cut after {where}: {found.reason}")
    return found.layer_id if text.isdecimal() else text  # a name stays one: on another path it is elsewhere


def _unused(name: str, wrapped: WrappedModel) -> bool:
    """Whether ``name`` is a module that the latest plan does not run: another input may."""
    path = name.partition("#")[0]
    ran = any(layer.name.partition("#")[0] == path or layer.name.startswith(f"{path}.") for layer in wrapped.layers)
    return not ran and any(module.path == path for module in walk(wrapped.model, wrapped.depth).values())
