"""`InputReader`: which kind an input is, and what the model is called with for it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from edge_client.call import Call
from edge_client.inputs.kinds import is_picture, looks_like_a_frame, plain, suffix_of, tensor_of
from edge_client.sources.cameras import is_camera, without_password
from edge_client.sources.videos import SUFFIXES as VIDEO_SUFFIXES
from shared_hooks.errors import InputMismatch, SpecError, near
from shared_hooks.models import Frame, FrameId, InputItem, ModelSpec, find_inputs
from shared_hooks.models.inputs import IMAGE_SUFFIXES, TENSOR_SUFFIXES, Inputs, read_tensors, tensors_of_bytes
from shared_hooks.tensors import UnknownHolder, flatten

# The arguments of a model's forward: has it room for these, and which constants of the spec go with them?


class Arguments:
    """Makes calls of one model. ``constants``: the spec's ``call_kwargs``, which a caller's own replace."""

    def __init__(self, model: nn.Module, constants: Mapping[str, Any]) -> None:
        self._constants = constants
        try:
            self._signature: inspect.Signature | None = inspect.signature(model.forward)
        except (TypeError, ValueError):  # code that is not Python's says nothing
            self._signature = None
        found = self._signature.parameters.values() if self._signature is not None else ()
        self._positional = [one.name for one in found if one.kind is one.POSITIONAL_OR_KEYWORD]
        self._known = [one.name for one in found if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Call:
        """With the constants that nobody gave."""
        return Call(args, {**self._left(args), **(kwargs or {})})

    def fit(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether there is room for all of them, and nothing is missing; True where nobody knows."""
        if self._signature is None:
            return True
        try:
            self._signature.bind(*args, **{**self._left(args), **kwargs})
        except TypeError:
            return False
        return True

    def are_in(self, item: Mapping[Any, Any]) -> bool:
        """Whether a dictionary's entries are keyword arguments; else it is one argument itself.

        Raises InputMismatch where only some of its names are the forward's, or some are missing.
        """
        if not all(isinstance(name, str) for name in item):
            return False
        if self.fit((), item):
            return True
        strange = [name for name in item if name not in self._known]
        if len(strange) == len(item):
            return False
        if strange:
            raise InputMismatch(
                f"the model has no argument {strange[0]!r}: it takes {', '.join(self._known)}."
                f"{near(strange[0], self._known)}"
            )
        raise InputMismatch(f"the dictionary has {', '.join(item)}; the model takes {', '.join(self._known)}")

    def _left(self, args: tuple[Any, ...]) -> dict[str, Any]:
        if not self._constants:
            return {}
        given = self._positional[: len(args)]
        return {name: value for name, value in self._constants.items() if name not in given}


TAKEN: Final = (
    "a tensor, a numpy array, a PIL image, a frame (uint8, height x width x 3, RGB), the path or the bytes of a file,"
    " a dictionary or BatchEncoding of the model's keyword arguments, a tuple of its positional ones, or a Call"
)
MAX_BYTES: Final = 1 << 30
MAX_PIXELS: Final = 89_478_485
"""Most of a picture that comes as bytes; for one in a file, Pillow warns from there on."""
_BYTES: Final = (bytes, bytearray, memoryview)


class InputReader:
    """For one model. ``preprocess``: pictures and files are read as the spec says, else only files of tensors are;
    ``call_kwargs``: the spec's constants are added.
    """

    def __init__(
        self, model: nn.Module, spec: ModelSpec | None, *, preprocess: bool = True, call_kwargs: bool = True
    ) -> None:
        self._spec = spec if preprocess else None
        self._off = "preprocess=False" if spec is not None else "a client made with a module"
        self._arguments = Arguments(model, spec.call_kwargs if spec is not None and call_kwargs else {})
        self._own_constants = call_kwargs

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """The call for what `EdgeClient.infer` was given. Raises InputMismatch."""
        if len(args) != 1 or kwargs:
            named = {name: plain(value, name) for name, value in kwargs.items()}
            return self._arguments.call(_plain(args), named)
        item = args[0]
        if isinstance(item, torch.Tensor):
            return self._arguments.call(args)
        if type(item) is tuple and not self._arguments.fit(item, {}):
            return self._arguments.call((plain(item, "the tuple"),))
        if type(item) is dict and not self._arguments.are_in(item):
            return self._arguments.call((plain(item, "the dictionary"),))
        return self.read(item)

    def read(self, item: Any) -> Call:
        """The call for one input of `EdgeClient.infer_many`, where tuples and dictionaries always are arguments."""
        if isinstance(item, Call):
            return item
        if isinstance(item, torch.Tensor):
            return self._arguments.call((item,))
        if type(item) is tuple:
            return self._arguments.call(_plain(item))
        if isinstance(item, Mapping) and (type(item) is dict or not isinstance(item, dict)):
            return self._arguments.call((), {str(name): _keyword(item, name) for name in item})
        if isinstance(item, (InputItem, Path, str)):
            return self._of_file(item)
        if isinstance(item, Frame):
            return self._of_frame(item)
        if isinstance(item, _BYTES):
            return self._of_bytes(bytes(item))
        if is_picture(item):
            return self._made(self._need("a picture").preprocess_picture(item))
        if isinstance(item, np.ndarray):
            return self._of_array(item)
        return self._as_it_is(item)

    def is_file(self, item: Any) -> bool:
        """Whether it names a file, which may also be sent unread."""
        return isinstance(item, (InputItem, Path, str))

    def _as_it_is(self, item: Any) -> Call:
        if isinstance(item, list) and any(is_picture(one) or isinstance(one, (*_BYTES, Path, str)) for one in item):
            raise _wrong(item)
        item = plain(item, "the input")
        try:
            known = item is not None and bool(flatten(item))
        except UnknownHolder:
            known = False
        if not known:
            raise _wrong(item)
        return self._arguments.call((item,))

    def _of_file(self, item: InputItem | Path | str) -> Call:
        path = item.path if isinstance(item, InputItem) else _checked(item)
        if self._spec is None and path.suffix.lower() in TENSOR_SUFFIXES:
            return self._arguments.call(*read_tensors(path))
        return self._made(self._need(str(path)).preprocess(path))

    def _of_frame(self, frame: Frame) -> Call:
        if self._spec is None:
            return self._arguments.call((tensor_of(frame.pixels),))
        return self._made(self._spec.preprocess(frame))

    def _of_bytes(self, data: bytes) -> Call:
        suffix = suffix_of(data)
        if self._spec is None and suffix in TENSOR_SUFFIXES:
            return self._arguments.call(*tensors_of_bytes(data, suffix, f"the {suffix} file"))
        return self._made(self._need(f"a {suffix} file").preprocess_bytes(suffix, data, MAX_BYTES, MAX_PIXELS))

    def _of_array(self, array: Any) -> Call:
        spec = self._spec
        if spec is None or not spec.reads_images or not looks_like_a_frame(array):
            return self._arguments.call((tensor_of(array),))
        if array.ndim == 3 and array.shape[2] == 3:
            return self._made(spec.preprocess(Frame(FrameId("frame", 0), array)))
        from PIL import Image

        return self._made(
            spec.preprocess_picture(Image.fromarray(array.squeeze(2) if array.shape[2:] == (1,) else array))
        )

    def _need(self, what: str) -> ModelSpec:
        if self._spec is None:
            raise InputMismatch(
                f"{what} is read as a spec says, and with {self._off} none does: give a tensor, an array, .npy or"
                " .safetensors"
            )
        return self._spec

    def _made(self, inputs: Inputs) -> Call:
        """The spec's own answer, which has its constants."""
        args, kwargs = inputs
        if not self._own_constants and self._spec is not None:
            kwargs = {name: value for name, value in kwargs.items() if name not in self._spec.call_kwargs}
        return Call(args, kwargs)


def several(inputs: Any) -> Any:
    """What `infer_many` goes through: of a file, folder, pattern, video or camera that is named, what is in it.

    Raises SpecError for one input where several belong.
    """
    if isinstance(inputs, (str, Path)):
        from edge_client.sources.opening import open_source

        return open_source([str(inputs)])
    if isinstance(inputs, (Mapping, *_BYTES)):
        raise SpecError(
            f"infer_many takes several inputs, and this is one, of type {type(inputs).__name__}: infer takes it"
        )
    return inputs


def _plain(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(plain(value, f"argument {number}") for number, value in enumerate(args, 1))


def _keyword(item: Mapping[Any, Any], name: Any) -> Any:
    value = plain(item[name], str(name))
    if isinstance(value, list) and not isinstance(item, dict):  # as a tokenizer gives them
        raise InputMismatch(f'{name} is a list of numbers: call the tokenizer (or processor) with return_tensors="pt"')
    return value


def _checked(word: Path | str) -> Path:
    """Raises InputMismatch for what is no file, or not one that a spec reads."""
    text, path = str(word), Path(word)
    if "://" in text and path.suffix.lower() in IMAGE_SUFFIXES | TENSOR_SUFFIXES:
        raise InputMismatch(f"{without_password(text)} is an address: fetch it, and give its bytes")
    if is_camera(text) or path.suffix.lower() in VIDEO_SUFFIXES:
        raise InputMismatch(f"{without_password(text)} is a video or a camera: infer_many goes through its frames")
    if path.is_dir():
        raise InputMismatch(f"{text} is a folder: infer_many goes through its files")
    return path if path.is_file() else find_inputs(path)[0].path  # which says what there is


def _wrong(item: Any) -> InputMismatch:
    kind = type(item)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    if hasattr(item, "read"):
        hint = "; give what its read() returns"
    elif hasattr(item, "to_numpy"):
        hint = "; give its to_numpy()"
    else:
        hint = "; infer_many takes several" if isinstance(item, (Iterator, list, set, frozenset, range)) else ""
    return InputMismatch(f"an input of type {name} is not taken: expected {TAKEN}{hint}")
