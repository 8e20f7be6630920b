"""Converts what `EdgeClient.infer` accepts into the model's arguments.

Tensors, and other arguments of a model, are passed unchanged. A picture, a frame, a file or its bytes are read as the
model's spec says, by its own code, with the same result as ``edge-client run``.

reader  `InputReader`: which kind an input is
kinds   arrays, pictures, bytes; what a model does not accept
"""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from edge_client.call import Call
from edge_client.model_choice import Inputs
from edge_client.screen import one_line
from edge_client.sources import SUFFIXES as VIDEO_SUFFIXES
from edge_client.sources import is_camera, without_password
from shared_hooks.errors import InputMismatch, SpecError, near
from shared_hooks.models import Frame, FrameId, InputItem, ModelSpec, find_inputs
from shared_hooks.models.inputs import IMAGE_SUFFIXES, TENSOR_SUFFIXES, read_tensors, tensors_of_bytes
from shared_hooks.tensors import UnknownHolder, flatten

_BEGINNINGS: Final = (
    (b"\x89PNG\r\n\x1a\n", ".png"),
    (b"\xff\xd8\xff", ".jpg"),
    (b"GIF8", ".gif"),
    (b"BM", ".bmp"),
    (b"II*\0", ".tif"),
    (b"MM\0*", ".tif"),
    (b"\x93NUMPY", ".npy"),
    *((b"P%d" % number, ".ppm") for number in range(1, 7)),
)
_CHANNELS: Final = (1, 3, 4)


def suffix_of(data: bytes) -> str:
    """Return the suffix of a file with these bytes. Raises InputMismatch for what is no picture and holds no
    tensors.
    """
    for beginning, suffix in _BEGINNINGS:
        if data.startswith(beginning):
            return suffix
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return ".webp"
    if data[8:9] == b"{" and int.from_bytes(data[:8], "little") <= len(data):
        return ".safetensors"
    raise InputMismatch(
        f"these {len(data)} bytes are no picture (PNG, JPEG, GIF, BMP, TIFF, WebP, PPM), no .npy and no .safetensors;"
        " of a raw frame give the array"
    )


def is_picture(value: object) -> bool:
    """Return whether it is a Pillow image, without importing Pillow."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def looks_like_a_frame(array: Any) -> bool:
    """uint8 pixels: (height, width) or (height, width, channels)."""
    shape = array.shape
    return bool(array.dtype == np.uint8 and (len(shape) == 2 or (len(shape) == 3 and shape[2] in _CHANNELS)))


def tensor_of(array: Any) -> torch.Tensor:
    """Return a contiguous copy in the machine's byte order, as of `.npy` files. Raises InputMismatch."""
    if array.dtype.hasobject or array.dtype.kind in "SUVMm":
        raise InputMismatch(f"an array of {array.dtype} is no tensor: expected numbers")
    try:
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
    except TypeError as error:
        raise InputMismatch(f"an array of {array.dtype} is no tensor: {error}") from error


def plain(value: Any, where: str) -> Any:
    """Return a model's argument with its arrays as tensors; the same object if there are none.

    Raises InputMismatch for what would have to be read first, which only single inputs are.
    """
    if isinstance(value, (torch.Tensor, str)) or value is None:
        return value
    if isinstance(value, np.ndarray):
        return tensor_of(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (bytes, bytearray, memoryview, PurePath)) or is_picture(value):
        raise InputMismatch(
            f"{where} is of type {type(value).__name__}: a picture or a file is read where it is the only input;"
            " here give a tensor or an array"
        )
    kind = type(value)
    if kind in (list, tuple):
        made = [plain(one, where) for one in value]
        return value if all(new is old for new, old in zip(made, value, strict=True)) else kind(made)
    if kind is dict:
        entries = {name: plain(one, where) for name, one in value.items()}
        return value if all(entries[name] is value[name] for name in value) else entries
    return value


# Keywords that a model accepts only through its ``**kwargs``, and that may be misspelt.
#
# ``attention_maks`` goes into the ``**kwargs`` of a model of transformers, and the answer is the unmasked one. What a
# model accepts is never refused: it is logged, once per name.


OWN: Final = ("split", "deadline")
"""The parameters of `EdgeClient.infer` itself."""
NEAR: Final = 0.8
"""The similarity from which a name counts as a typo: ``output_attentions`` and ``attention_mask`` are not one of each
other.
"""
log = logging.getLogger("edge_client")


class Swallowed:
    """Warns of keywords that a model accepts but ignores. ``usual``: the example's keywords, which cause no warning.
    Thread-safe.
    """

    def __init__(self, model: nn.Module, usual: Iterable[str]) -> None:
        try:
            found = list(inspect.signature(model.forward).parameters.values())
        except (TypeError, ValueError):  # code that is not Python's has no signature
            found = []
        self._takes_any = any(one.kind is one.VAR_KEYWORD for one in found)
        self._positional = [one.name for one in found if one.kind is one.POSITIONAL_OR_KEYWORD]
        self._known = [*self._positional, *(one.name for one in found if one.kind is one.KEYWORD_ONLY)]
        self._usual = {*usual, *self._known}
        self._seen: set[tuple[int, tuple[str, ...]]] = set()
        self._logged: set[str] = set()

    def look(self, call: Call) -> None:
        """Warn of the keywords of ``call``, once."""
        names = len(call.args), tuple(call.kwargs)
        if not self._takes_any or names in self._seen:
            return
        self._seen.add(names)
        given = {*self._positional[: len(call.args)], *call.kwargs}
        meant = [name for name in (*self._known, *OWN) if name not in given]
        for name in call.kwargs:
            if name not in self._usual and name not in self._logged and (hint := near(name, meant, NEAR)):
                self._logged.add(name)
                line = f"the model names no argument {name!r:.60}, and takes it by its **kwargs.{hint}"
                log.warning("%s", line)
                warnings.warn(line, UserWarning, stacklevel=5)


# Why a model raised, where its inputs explain it: compared with its forward's parameters, and with an example that
# works.
#
# Called only after it raised: models accept more than their example shows, and what a model accepts is never refused.


MOST: Final = 200
"""Most characters of the model's own error, which is the cause."""
_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def unfit(model: nn.Module, inputs: Inputs, example: Inputs | None, error: Exception) -> InputMismatch | None:
    """Return what is wrong with ``inputs``, on which ``model`` raised ``error``, in one line; None if nothing seems to
    be.

    Wrong are unknown names, too many or too few arguments, and, compared with the ``example``, another dtype or rank,
    or something that is no tensor in place of one. Sizes may differ: `another_size`.
    """
    found = _misnamed(model, inputs, example) or next(_unlike(model, inputs, example), "") or _no_tensor(model, inputs)
    if not found:
        return None
    reported = one_line(f"{type(error).__name__}: {error}")
    return InputMismatch(f"{found} (the model: {reported if len(reported) <= MOST else reported[: MOST - 1] + '…'})")


def another_size(model: nn.Module, inputs: Inputs, example: Inputs | None) -> str:
    """Return the end of a message: that the example's first input is missing, or which one differs in a size other than
    the batch; "" otherwise.
    """
    if example is None:
        return ""
    ours, theirs = _by_name(model, inputs), _by_name(model, example)
    if (first := next(iter(theirs), None)) is not None and first not in ours:
        return f" (the example gives {first})"
    for name, other in theirs.items():
        one = ours.get(name)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape[1:] != other.shape[1:]:
            return f" ({name} is {_form(one)}, in the example {_form(other)})"
    return ""


def _misnamed(model: nn.Module, inputs: Inputs, example: Inputs | None) -> str:
    """Unknown names, or names accepted by ``**kwargs`` that resemble a parameter; the wrong number of arguments."""
    signature = _signature(model)
    if signature is None:
        return ""
    args, kwargs = inputs
    known = [one.name for one in signature.parameters.values() if one.kind in _NAMED]
    takes = f"it takes {', '.join(known)}"
    usual = {*known, *(example[1] if example is not None else ())}
    meant = args[0] if len(args) == 1 and not kwargs and isinstance(args[0], Mapping) else kwargs
    strange = [name for name in meant if isinstance(name, str) and name not in usual]
    missing = [name for name in known if name not in kwargs]
    for name in strange:
        if hint := near(name, missing) or near(name, OWN, NEAR):
            return f"the model has no argument {name!r:.60}: {takes}.{hint}"
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        if strange:
            return f"the model has no argument {strange[0]!r:.60}: {takes}"
        return f"the model cannot be called so, {error}: {takes}"
    return ""


def _unlike(model: nn.Module, inputs: Inputs, example: Inputs | None) -> Iterator[str]:
    """Return what differs in kind, dtype or rank from the example."""
    if example is not None:
        ours, theirs = _by_name(model, inputs), _by_name(model, example)
        for name, other in theirs.items():
            if name in ours:
                yield from _pairs(name, ours[name], other)


def _pairs(name: str, one: Any, other: Any) -> Iterator[str]:
    if isinstance(other, torch.Tensor):
        if not isinstance(one, torch.Tensor):
            yield f"{name} is {_kind(one)}, in the example {_form(other)}{_remedy(one)}"
        elif one.dtype != other.dtype or one.dim() != other.dim():
            yield f"{name} is {_form(one)}, in the example {_form(other)}"
    elif isinstance(other, (list, tuple)) and isinstance(one, (list, tuple)):
        for at, (ours, theirs) in enumerate(zip(one, other, strict=False)):
            yield from _pairs(f"{name}[{at}]", ours, theirs)
    elif isinstance(other, Mapping) and isinstance(one, Mapping):
        for key in other:
            if key in one:
                yield from _pairs(f"{name}[{key!r}]", one[key], other[key])
    elif isinstance(other, (list, tuple, Mapping)):
        yield f"{name} is {_kind(one)}, in the example {_kind(other)}"


def _no_tensor(model: nn.Module, inputs: Inputs) -> str:
    """Explains if no input is, or contains, a tensor."""
    found = _by_name(model, inputs)
    plain = [name for name, value in found.items() if isinstance(value, (bool, int, float, complex, str, type(None)))]
    if not plain or len(plain) < len(found):
        return ""
    first = found[plain[0]]
    return f"{plain[0]} is {_kind(first)}, and no input is a tensor{_remedy(first)}"


def _by_name(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """Return every argument by its parameter's name; "argument 1", ... if it has none."""
    args, kwargs = inputs
    signature = _signature(model)
    parameters = () if signature is None else signature.parameters.values()
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.POSITIONAL_ONLY)]
    names += [f"argument {at}" for at in range(len(names) + 1, len(args) + 1)]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _signature(model: nn.Module) -> inspect.Signature | None:
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):  # code that is not Python's has no signature
        return None


def _form(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _form(value)
    if value is None:
        return "None"
    if isinstance(value, Mapping):
        return f"a dictionary of {', '.join(map(str, value))}"[:MOST]
    return "text" if isinstance(value, str) else f"of type {type(value).__name__}"


def _remedy(value: Any) -> str:
    if isinstance(value, str):
        return ": give what the model's tokenizer makes of it"
    return ": give a tensor" if isinstance(value, (bool, int, float, list, tuple)) else ""


# The arguments of a model's forward: does it accept these, and which constants of the spec go with them?


class Arguments:
    """Builds calls of one model. ``constants``: the spec's ``call_kwargs``, which a caller's own arguments override."""

    def __init__(self, model: nn.Module, constants: Mapping[str, Any]) -> None:
        self._constants = constants
        try:
            self._signature: inspect.Signature | None = inspect.signature(model.forward)
        except (TypeError, ValueError):  # code that is not Python's has no signature
            self._signature = None
        found = self._signature.parameters.values() if self._signature is not None else ()
        self._positional = [one.name for one in found if one.kind is one.POSITIONAL_OR_KEYWORD]
        self._known = [one.name for one in found if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Call:
        """Return the call, with constants for what is not given."""
        return Call(args, {**self._left(args), **(kwargs or {})})

    def fit(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether the arguments fit the signature; True if that is unknown."""
        if self._signature is None:
            return True
        try:
            self._signature.bind(*args, **{**self._left(args), **kwargs})
        except TypeError:
            return False
        return True

    def are_in(self, item: Mapping[Any, Any]) -> bool:
        """Return whether a dictionary's entries are keyword arguments; otherwise it is one argument itself.

        Raises InputMismatch if only some of its names are parameters, or some are missing.
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
"""The size limit of a picture given as bytes; for one in a file, Pillow warns from there on."""
_BYTES: Final = (bytes, bytearray, memoryview)


class InputReader:
    """Reads the inputs of one model. ``preprocess``: read pictures and files as the spec says, else only files of
    tensors; ``call_kwargs``: add the spec's constants.
    """

    def __init__(
        self, model: nn.Module, spec: ModelSpec | None, *, preprocess: bool = True, call_kwargs: bool = True
    ) -> None:
        self._spec = spec if preprocess else None
        self._off = "preprocess=False" if spec is not None else "a client made with a module"
        self._arguments = Arguments(model, spec.call_kwargs if spec is not None and call_kwargs else {})
        self._own_constants = call_kwargs

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Return the call for the arguments of `EdgeClient.infer`. Raises InputMismatch."""
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
        """Return the call for one input of `EdgeClient.infer_many`, where tuples and dictionaries always are
        arguments.
        """
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
        """Return whether it names a file, which may also be sent unread."""
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
        """Return the result of the spec's own code, which includes its constants."""
        args, kwargs = inputs
        if not self._own_constants and self._spec is not None:
            kwargs = {name: value for name, value in kwargs.items() if name not in self._spec.call_kwargs}
        return Call(args, kwargs)


def several(inputs: Any) -> Any:
    """Return the inputs for `infer_many`: for a named file, folder, pattern, video or camera, its content.

    Raises SpecError for a single input.
    """
    if isinstance(inputs, (str, Path)):
        from edge_client.sources import open_source

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
    if isinstance(value, list) and not isinstance(item, dict):  # as returned by a tokenizer
        raise InputMismatch(f'{name} is a list of numbers: call the tokenizer (or processor) with return_tensors="pt"')
    return value


def _checked(word: Path | str) -> Path:
    """Raise InputMismatch for what is no file, or none that a spec reads."""
    text, path = str(word), Path(word)
    if "://" in text and path.suffix.lower() in IMAGE_SUFFIXES | TENSOR_SUFFIXES:
        raise InputMismatch(f"{without_password(text)} is an address: fetch it, and give its bytes")
    if is_camera(text) or path.suffix.lower() in VIDEO_SUFFIXES:
        raise InputMismatch(f"{without_password(text)} is a video or a camera: infer_many goes through its frames")
    if path.is_dir():
        raise InputMismatch(f"{text} is a folder: infer_many goes through its files")
    return path if path.is_file() else find_inputs(path)[0].path  # which lists what there is


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
