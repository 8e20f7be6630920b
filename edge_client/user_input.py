"""What users pass: a model, inputs and a cut, as text, as files or in memory. Errors name the text, its option on the
command line, and similar words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch
import xxhash
from torch import nn

from edge_client.call import Call
from edge_client.core import ClientCore
from edge_client.inputs import TAKEN, InputReader, is_picture, plain, unfit
from edge_client.model_choice import Inputs, ModelChoice
from edge_client.screen import one_line, printable
from edge_client.sources import SUFFIXES as VIDEO_SUFFIXES
from edge_client.sources import Item, is_camera, without_password
from edge_client.user_text import CLOUD_FILE, CLOUD_ONLY, EDGE_ONLY, WORDS, either, option
from shared_hooks import WrappedModel
from shared_hooks.config import resolve
from shared_hooks.errors import CutRefused, InputMismatch, IsthmusError, ModelFailed, SpecError, UnknownLayer, near_path
from shared_hooks.models import Frame, InputItem, ModelSpec, find_inputs
from shared_hooks.models.inputs import to_device
from shared_hooks.modules import call_parts, walk
from shared_hooks.planning import LayerInfo, Plan, blocks
from shared_hooks.showing import short
from shared_hooks.tensors import copied, flatten

AnItem = TypeVar("AnItem", bound=Item)


@short
@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A wrapped model that is planned on one input."""

    choice: ModelChoice
    """What it was made from."""
    spec: ModelSpec
    wrapped: WrappedModel
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    plan_digest: str

    @property
    def cuts(self) -> list[LayerInfo]:
        """The places for a cut, of the latest plan, down to the choice's `depth`."""
        return list(self.plan.within(self.choice.depth))

    @property
    def plan(self) -> Plan:
        """The latest plan, on its input."""
        return self.wrapped.plan(*self.args, **self.kwargs)


def name_of(model_id: str) -> str:
    """Return the id of a served model without its version: "net:2" is a version of "net"."""
    return model_id.partition(":")[0]


def load(choice: ModelChoice, inputs: Sequence[str] | None = None) -> LoadedModel:
    """Return the model, planned on its example, or on the first of ``inputs`` (--input) if given."""

    spec, device = choice.spec(), choice.set_up()
    args, kwargs = example_of(choice, inputs)
    wrapped = WrappedModel(spec.load_model(device))
    try:
        return LoadedModel(choice, spec, wrapped, args, kwargs, wrapped.plan(*args, **kwargs).digest)
    except BaseException as error:
        wrapped.detach()
        if isinstance(error, IsthmusError) or not isinstance(error, Exception):
            raise
        raise fails_on(spec, inputs[0] if inputs else None, error, wrapped.model, (args, kwargs)) from error


def fails_on(
    spec: ModelSpec, name: str | None, error: Exception, model: nn.Module, inputs: Inputs | None
) -> IsthmusError:
    """Return the error for a model that raised ``error`` on the input ``name`` to plan on; None: the example.

    ``inputs``: what it was called with; None: reading the input raised.
    """
    if name is not None and inputs is not None and (wrong := unfit(model, inputs, spec.example(), error)) is not None:
        return InputMismatch(f"{name}: {wrong}")
    reported, what = one_line(f"{type(error).__name__}: {error}"), name or "its example"
    others = either("--example and --input say another", "ModelChoice(..., example=...) and inputs say another")
    return ModelFailed(f"{spec.origin}: the model fails on {what}: {reported} ({others})")


def example_of(choice: ModelChoice, inputs: Sequence[str] | None = None) -> Inputs:
    """Return what to plan on, on the model's device: the first of ``inputs`` (--input), else the spec's example."""
    spec, device = choice.spec(), choice.set_up()
    call = spec.preprocess(find(inputs)[0]) if inputs else spec.example(device)
    if call is None:
        resolve(spec.factory, spec.folder, f"{spec.origin}: factory")  # so that a wrong name is reported first
        raise SpecError(
            f"{spec.origin}: no example input to plan on; give one with "
            + either("--example 1,3,224,224 or --input", "ModelChoice(..., example='1,3,224,224')")
        )
    return to_device(call[0], device), to_device(call[1], device)


def find(patterns: Sequence[str]) -> list[InputItem]:
    """Return the files of --input; SpecError for one that does not exist."""

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
    """Return the first input that ``spec`` can read; the first one if none can be."""
    for item in items:
        try:
            spec.preprocess(item)
        except Exception:  # a spec's own code may raise anything: it is reported with its input
            continue
        return item
    return items[0]


def cut_for(client: ClientCore, split: str, items: Sequence[Item]) -> int | str:
    """--split for a prepared client, before anything is sent: on the example's plan, else on the first readable
    input's.

    Raises UnknownLayer, CutRefused. Words that are no cut, such as "edge-only", are returned unchanged.
    """

    if split in (EDGE_ONLY, CLOUD_ONLY, CLOUD_FILE):
        return split
    if client.spec is not None and client.spec.example() is None:
        for item in items:
            try:
                args, kwargs = client.spec.preprocess(item)
                client.wrapped.plan(*to_device(args, client.device), **to_device(kwargs, client.device))
            except Exception:  # preprocessing and the model may raise anything: it is reported with its input
                continue
            break
        else:
            return split
    return cut_of(split, client.wrapped)


def cut_of(text: str, wrapped: WrappedModel, name: str | None = None) -> int | str:
    """Return a cut as the engine takes it: "input", a name, or a layer's id. ``name``: for messages; None: the option
    or keyword `split`, which accepts more words. Raises UnknownLayer, CutRefused.

    A name stays a name, because on another path through the model the layer has another id.
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
    return found.layer_id if text.isdecimal() else text  # a name is kept as a name: on another path its id differs


def _unused(name: str, wrapped: WrappedModel) -> bool:
    """Return whether ``name`` is a module that the latest plan does not run: another input may."""
    path = call_parts(name)[0]
    ran = any(call_parts(layer.name)[0] == path or layer.name.startswith(f"{path}.") for layer in wrapped.layers)
    return not ran and any(module.path == path for module in walk(wrapped.model, wrapped.depth).values())


NAMELESS: Final = "input"
_KINDS: Final = (Call, tuple, Mapping, torch.Tensor, np.ndarray, bytes, bytearray, memoryview, Frame)


@dataclass(frozen=True)
class NamedInput:
    """One input: a file, read again each time, or ``value`` in memory, converted as by `EdgeClient.infer`. ``label``:
    its truth, if no file contains it.
    """

    name: str
    item: InputItem | None = None
    value: Any = None
    label: str | None = None
    made: bool = False
    """From the spec itself, which is compared otherwise."""

    @property
    def truth(self) -> str | None:
        """Its true label, or None."""
        return self.label if self.item is None else self.item.truth

    @property
    def shown_truth(self) -> str | None:
        """The label as text for tables."""
        return None if self.truth is None else printable(self.truth)

    @property
    def file_name(self) -> str:
        """The file's name without its folder; the name of what is in memory."""
        return self.name if self.item is None else self.item.name

    @property
    def origin(self) -> str:
        """The file's full path; the name of what is in memory."""
        return self.name if self.item is None else self.item.origin

    def read(self, spec: ModelSpec) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) on the CPU, as new objects. Raises InputMismatch."""
        if self.item is not None:
            return spec.preprocess(self.item)
        call = InputReader(nn.Module(), spec).read(self.value)
        return copied(call.args, dict(call.kwargs))

    def digest(self) -> str:
        """Return a digest of the file's bytes, or of what is in memory; empty for what is `made`. Raises SpecError."""
        if self.made:
            return ""
        if self.item is None:
            return _digest(self.value)
        try:
            return xxhash.xxh3_64_hexdigest(self.item.path.read_bytes())
        except OSError as error:
            raise SpecError(f"{self.item.path} cannot be read: {error.strerror}") from error


def named_inputs(inputs: Any) -> list[NamedInput]:
    """Return all of ``inputs``, in order; empty for None. A list contains several, anything else is one: a tuple or a
    dictionary is the arguments of one call.

    Raises InputMismatch for a missing file, and for a kind of input that is not supported.
    """
    if inputs is None:
        return []
    if isinstance(inputs, list) and inputs and all(isinstance(each, (str, Path)) for each in inputs):
        found = named(find_inputs(inputs))  # each file once
    elif isinstance(inputs, list):
        found = [one for each in inputs for one in _one(each)]
    else:
        found = _one(inputs)
    if not found:
        raise InputMismatch("no input: the list is empty")
    return [replace(one, name=f"input {at}") if one.name == NAMELESS else one for at, one in enumerate(found)]


def _one(value: Any) -> list[NamedInput]:
    if isinstance(value, NamedInput):
        return [value]
    if isinstance(value, InputItem):
        return named([value])
    if isinstance(value, (str, Path)):
        return named(find_inputs(value))
    if isinstance(value, _KINDS) or is_picture(value):
        return [NamedInput(NAMELESS, value=value)]
    raise InputMismatch(
        f"an input of type {type(value).__name__} is not taken: expected {TAKEN}; a folder, a glob, or a list of inputs"
    )


def named(items: Sequence[InputItem]) -> list[NamedInput]:
    """Inputs by file name; by path if several files have one name."""
    names = [item.name for item in items]
    return [
        NamedInput(printable(item.name if names.count(item.name) == 1 else str(Path(item.path))), item)
        for item in items
    ]


def labelled(pairs: Iterable[Any], what: str) -> list[NamedInput]:
    """Inputs with labels, from pairs of an input in memory and its label. Raises InputMismatch for what is no pair."""
    found = []
    for at, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InputMismatch(f"{what} is a folder, or a list of (input, label); entry {at} is no such pair")
        label = pair[1].item() if isinstance(pair[1], (torch.Tensor, np.generic)) else pair[1]
        (one,) = _one(pair[0])
        found.append(replace(one, name=f"input {at}", label=None if label is None else str(label)))
    return found


def _digest(value: Any) -> str:
    hasher = xxhash.xxh3_64()
    if isinstance(value, (bytes, bytearray, memoryview)):
        hasher.update(value)
    elif is_picture(value):
        hasher.update(f"{value.mode} {value.size}".encode() + value.tobytes())
    else:
        pixels = value.pixels if isinstance(value, Frame) else None
        call = Call.of(dict(value) if isinstance(value, Mapping) else value if pixels is None else pixels)
        structure, tensors = flatten(plain((call.args, dict(call.kwargs)), "the input"))
        hasher.update(repr(structure).encode())
        for tensor in tensors:
            hasher.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            hasher.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return hasher.hexdigest()
