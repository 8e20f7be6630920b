"""Define the model spec: a model's name, and how it is built, fed and read.

Both sides use the same spec. Only the model's id and hashes of the result cross the wire.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shared_hooks import devices
from shared_hooks.config import Table, kind_of, looks_like_target, resolve
from shared_hooks.errors import InputMismatch, IsthmusError, SpecError, TooLarge, UnknownModel, near
from shared_hooks.frames import Frame
from shared_hooks.models import images
from shared_hooks.models.drawing import Prediction, TopK, load_tokenizer, read_labels
from shared_hooks.models.images import DTYPES, ImagePreprocess, as_png, picture_as_png
from shared_hooks.models.inputs import (
    TENSOR_SUFFIXES,
    Example,
    InputItem,
    Inputs,
    entry_of,
    example_like,
    inputs_of,
    read_example,
    read_tensors,
    tensors_of_bytes,
    to_device,
)
from shared_hooks.models.weights import into_memory, load_weights
from shared_hooks.showing import short

if TYPE_CHECKING:
    from PIL.Image import Image

    from shared_hooks.models.drawing import Drawing
    from shared_hooks.models.weights import MappedWeights
    from shared_hooks.selection.prune import Selection

_building = threading.RLock()
"""Held while a model draws its weights."""


@short
@dataclass(frozen=True)
class ModelSpec:
    """A model's spec, made by `load_spec` or `spec_from_table` (`named`). Building the model and reading inputs is
    lazy.
    """

    model_id: str
    origin: str
    """The file it was read from, or the command-line text; prefixes every message."""
    folder: Path
    factory: str
    factory_kwargs: Mapping[str, Any] = field(default_factory=dict)
    weights: tuple[Path, ...] = ()
    selection: Path | None = None
    """A file of edge-client prune: a mask at a cut, or a smaller model with its own weights."""
    seed: int = 0
    dtype: torch.dtype | None = None
    call_kwargs: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    tokenizer: str | None = None
    """``module:callable``, or a folder relative to the spec: turns token ids into text for observers."""
    description: str = ""
    _example: Example | None = None
    _keywords: frozenset[str] = frozenset()
    _preprocess: ImagePreprocess | str | None = None
    _postprocess: TopK | str = field(default_factory=lambda: TopK(strict=False))
    _drawing: Drawing | None = None

    def load_model(self, device: torch.device | str = "cpu") -> nn.Module:
        """Build a model with its weights, in eval mode, on ``device``.

        Without a weights file the factory's weights are random, from the spec's ``seed``: the same in every process.
        Raises SpecError if the factory fails or returns no module, or the weights do not fit.
        """
        model = self._built()
        chosen = self._chosen()
        if self.weights and (chosen is None or chosen.is_mask):
            load_weights(model, self.weights, f"{self.origin}: weights")
        if chosen is not None:
            model = chosen.apply(model)
        place = torch.device(device)
        for name, one in model.state_dict().items():
            if devices.refuses(place, one.dtype):
                raise SpecError(
                    f'{self.origin}: {name} is {one.dtype}, which {device} does not have; dtype = "float32"'
                )
        model = model.eval().to(device)
        into_memory(model)
        return model

    def load_shard(self, size: int) -> nn.Module:
        """Load this process's share of the weights, which transformers divides among ``size`` processes by the
        ``tp_plan``.

        `torch.distributed` connects the processes. Raises SpecError if that is not possible.
        """
        where = f"{self.origin}: tensor parallel"
        if self.factory.rpartition(".")[2] != "from_pretrained" or self.weights or self.selection is not None:
            raise SpecError(
                f"{where}: for models of transformers whose factory is from_pretrained, with no other weights"
            )
        try:
            from transformers.distributed.configuration_utils import DistributedConfig
        except ImportError as error:
            raise SpecError(f"{where}: needs a transformers with transformers.distributed: {error}") from error

        def build() -> object:
            made: Any = resolve(self.factory, self.folder, f"{self.origin}: factory")
            return made(**self.factory_kwargs, distributed_config=DistributedConfig(tp_size=size))

        model = self._built(instead=build)
        if not any(hasattr(one, "full_tensor") for one in model.parameters()):
            raise SpecError(f"{where}: {type(model).__name__} has no tp_plan: transformers does not divide its weights")
        into_memory(model)
        return model.eval()

    def _files(self) -> tuple[tuple[Path, ...], Callable[[], object] | None]:
        """Return the weights' files, and what builds the model without them if it is not the factory."""
        return (self.weights, None) if self.weights else _pretrained(self) or ((), None)

    def weights_bytes(self) -> int:
        """Return the size of the weights' files; 0 if the factory makes the weights."""
        return sum(file.stat().st_size for file in self._files()[0])

    def load_mapped(self) -> tuple[nn.Module, MappedWeights]:
        """Load the model on the CPU, with its parameters left in their files (`mapped`).

        Raises SpecError, also if they are not in files.
        """
        from shared_hooks.models.weights import (
            MappedWeights,  # rarely needed
            unfilled,
        )

        files, build = self._files()
        if not files:
            raise SpecError(f"{self.origin}: weights: there is no file to leave them in: the factory makes them")
        chosen = self._chosen()
        if chosen is not None and not chosen.is_mask:
            raise SpecError(f"{chosen.path}: a smaller model's weights cannot be left in their file; a mask's can")
        model = self._built(unfilled, build)
        weights = MappedWeights(model, files, f"{self.origin}: weights")
        if chosen is not None:
            model = chosen.apply(model)
        return model.eval(), weights

    def _built(
        self,
        how: Callable[[Callable[[], object]], object] = lambda build: build(),
        instead: Callable[[], object] | None = None,
    ) -> nn.Module:
        """Run the factory, or ``instead`` of it another builder, and return the model with the factory's weights."""
        # importing the factory's module may draw random numbers, too; and all threads share one generator
        with _building, devices.forked():
            build = resolve(self.factory, self.folder, f"{self.origin}: factory")
            if isinstance(build, nn.Module):
                raise SpecError(
                    f'{self.origin}: factory: "{self.factory}" is a model already; expected a function or a class'
                )
            try:
                # The CPU's generator only: seeding CUDA would change the state of other users of the device.
                with devices.forked(seed=self.seed):
                    model = how(instead or partial(build, **self.factory_kwargs))
            except Exception as error:
                raise SpecError(
                    f'{self.origin}: factory: "{self.factory}" raised {type(error).__name__}: {error}{self._beside()}'
                ) from error
        if not isinstance(model, nn.Module):
            raise SpecError(
                f'{self.origin}: factory: "{self.factory}" returned {type(model).__name__}; expected a torch.nn.Module'
            )
        return model if self.dtype is None else model.to(self.dtype)

    def _beside(self) -> str:
        """Return a hint for the end of a message: what a text may have been meant to be."""
        for value in self.factory_kwargs.values():
            if isinstance(value, str) and value and not os.path.isabs(value) and (self.folder / value).exists():
                return f' ("{value}" beside the spec is written "./{value}")'
        return ""

    def _chosen(self) -> Selection | None:
        if self.selection is None:
            return None
        from shared_hooks.selection.prune import read_selection  # few models have one

        return read_selection(self.selection)

    def example(self, device: torch.device | str = "cpu") -> Inputs | None:
        """Return the inputs that both sides plan on, equal in every process; None if the spec has none."""
        if self._example is None:
            return None
        try:
            args, kwargs = self._example()
        except IsthmusError as error:
            raise SpecError(f"{self.origin}: example: {error}") from error
        except Exception as error:
            raise SpecError(f"{self.origin}: example: raised {type(error).__name__}: {error}") from error
        device = torch.device(device)
        args, kwargs = to_device(args, device), to_device(kwargs, device)
        return args, {**self.call_kwargs, **kwargs}

    def preprocess(self, item: InputItem | Frame | Path | str) -> Inputs:
        """Preprocess one input file, or a frame, to (args, kwargs): tensors on the CPU, batch of one.

        Images take the spec's [preprocess]; .npy and .safetensors are used unchanged, unless the spec names its own
        callable, which gets the path of every file (a frame's is a temporary PNG file). Raises InputMismatch for an
        unusable file.
        """
        if isinstance(item, Frame):
            args, kwargs = self._read_frame(item)
        else:
            args, kwargs = self._read(item.path if isinstance(item, InputItem) else Path(item))
        return args, {**self.call_kwargs, **kwargs}

    def preprocess_bytes(
        self, suffix: str, data: bytes, max_bytes: int = 1 << 28, max_pixels: int = images.MAX_PIXELS
    ) -> Inputs:
        """Preprocess the bytes of an untrusted file; ``suffix`` such as ".png" gives its type.

        Raises InputMismatch, and TooLarge for more than ``max_bytes`` once decoded, or ``max_pixels`` of an image.
        """
        suffix = images.check_suffix(suffix)
        name = f"the {suffix} file"
        if isinstance(self._preprocess, str):
            with images.as_path(suffix, data) as path:
                args, kwargs = self._read(path)
        elif suffix in TENSOR_SUFFIXES:
            if len(data) > max_bytes:
                raise TooLarge(f"a file of {len(data)} bytes; at most {max_bytes} are taken")
            args, kwargs = tensors_of_bytes(data, suffix, name, self._keywords)
        else:
            most = min(max_pixels, max_bytes // images.BYTES_PER_PIXEL)
            args, kwargs = self._image(self._images(name).of_bytes(data, name, most))
        return args, {**self.call_kwargs, **kwargs}

    def preprocess_picture(self, image: Image) -> Inputs:
        """Preprocess an image opened with Pillow (for the spec's own callable, as a PNG file). Raises as above."""
        if isinstance(self._preprocess, str):
            with images.as_path(".png", picture_as_png(image)) as path:
                args, kwargs = self._read(path)
        else:
            args, kwargs = self._image(self._images("the picture").of_image(image))
        return args, {**self.call_kwargs, **kwargs}

    def picture(self, path: Path) -> Image | None:
        """Return an image file as the model sees it: rotated, resized, cropped; None if [preprocess] does not read it.

        Raises InputMismatch.
        """
        if not isinstance(self._preprocess, ImagePreprocess) or path.suffix.lower() in TENSOR_SUFFIXES:
            return None
        return self._preprocess.seen(path)

    @property
    def reads_images(self) -> bool:
        """Whether the spec defines how images are preprocessed."""
        return self._preprocess is not None

    def preprocess_digest(self) -> str:
        """Return a hexadecimal digest of how files are read: equal if the same file gives the same inputs."""
        own = self._preprocess
        resolved = resolve(own, self.folder, f"{self.origin}: preprocess") if isinstance(own, str) else None
        return images.digest((self._preprocess, sorted(self._keywords)), resolved, self.call_kwargs)

    def _read(self, path: Path) -> Inputs:
        if isinstance(self._preprocess, str):
            where = f"{self.origin}: preprocess"
            convert = resolve(self._preprocess, self.folder, where)
            try:
                return inputs_of(convert(path), where)
            except IsthmusError:
                raise
            except Exception as error:
                raise InputMismatch(f"{path}: {self._preprocess} raised {type(error).__name__}: {error}") from error
        if path.suffix.lower() in TENSOR_SUFFIXES:
            return read_tensors(path, self._keywords)
        return self._image(self._images(str(path))(path))

    def _read_frame(self, frame: Frame) -> Inputs:
        if isinstance(self._preprocess, str):
            with images.as_path(".png", as_png(frame.pixels)) as path:
                return self._read(path)
        return self._image(self._images(frame.id.name).of_pixels(frame.pixels))

    def _images(self, name: str) -> ImagePreprocess:
        if isinstance(self._preprocess, ImagePreprocess):
            return self._preprocess
        raise InputMismatch(
            f"{name}: model {self.model_id} has no [preprocess] for images; give .npy or .safetensors, or a spec"
            f" file with it"
        )

    def _image(self, image: torch.Tensor) -> Inputs:
        keyword = self._images("").keyword
        return ((), {keyword: image}) if keyword else ((image,), {})

    @property
    def draws(self) -> bool:
        """Whether the spec has a [draw] table."""
        return self._drawing is not None

    def draw(self, item: InputItem | Path | str, output: object) -> Image:
        """Draw [draw]'s parts of ``output`` on the model's input image (without [preprocess]: on the file itself).

        Raises SpecError without [draw], InputMismatch if the file is no image or the output lacks those parts.
        """
        if self._drawing is None:
            raise SpecError(f"{self.origin}: the spec has no [draw], which says where boxes, masks or classes are")
        images = self._preprocess if isinstance(self._preprocess, ImagePreprocess) else ImagePreprocess()
        picture = images.seen(item.path if isinstance(item, InputItem) else Path(item))
        return self._drawing(output, picture, self.labels)

    def load_tokenizer(self) -> Any:
        """Load the tokenizer that turns token ids into text; None if the spec has none. Raises SpecError."""
        if self.tokenizer is None:
            return None
        return load_tokenizer(self.tokenizer, self.folder, f"{self.origin}: tokenizer")

    @property
    def ranks_classes(self) -> bool:
        """Whether the spec says that the output holds class scores: by labels, or by its own [postprocess]."""
        return bool(self.labels) or not isinstance(self._postprocess, TopK) or self._postprocess.strict

    def postprocess(self, output: object) -> list[Prediction]:
        """Return predictions, best first, row by row; none if the spec does not say and the output holds no class
        scores.
        """
        if isinstance(self._postprocess, TopK):
            return self._postprocess(output, self.labels)
        where = f"{self.origin}: postprocess"
        convert = resolve(self._postprocess, self.folder, where)
        try:
            result = convert(output)
        except IsthmusError:
            raise
        except Exception as error:
            raise SpecError(f"{where}: {self._postprocess} raised {type(error).__name__}: {error}") from error
        if not isinstance(result, Sequence) or not all(isinstance(entry, Prediction) for entry in result):
            raise SpecError(f"{where}: {self._postprocess} must return a list of Prediction, got {kind_of(result)}")
        return list(result)


def _pretrained(spec: ModelSpec) -> tuple[tuple[Path, ...], Callable[[], object]] | None:
    """Return the safetensors files that the factory, a ``from_pretrained`` of transformers, would read, and what builds
    its model without them. None for any other factory.
    """
    kind, _, method = spec.factory.rpartition(".")
    if method != "from_pretrained" or set(spec.factory_kwargs) != {"pretrained_model_name_or_path"}:
        return None  # its other arguments may change the weights
    folder = Path(str(spec.factory_kwargs["pretrained_model_name_or_path"]))
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        index = folder / "model.safetensors.index.json"
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    except (OSError, ValueError, KeyError):
        return None
    files = tuple(sorted(folder / name for name in names))
    if "quantization_config" in described or not all(file.is_file() for file in files):
        return None

    def build() -> object:
        from transformers import AutoConfig, GenerationConfig

        made_by: Any = resolve(kind, spec.folder, f"{spec.origin}: factory")
        config = AutoConfig.from_pretrained(folder)
        make = getattr(made_by, "from_config", None) or made_by._from_config
        model = make(config, dtype=getattr(config, "dtype", None) or torch.float32)
        if (folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
        return model

    return files, build


# From a model's name to its spec: a file, a built-in name, a callable. docs/model-spec.md describes the format.


BUILT_IN: Mapping[str, Path] = {"digits": Path(__file__).parent / "digits" / "digits.toml"}
"""The models that ship with Isthmus, by name."""

CODE_OR_WEIGHTS = frozenset({".py", ".pt", ".pth", ".bin", ".ckpt", ".onnx", ".safetensors"})
"""Suffixes of files that are mistaken for specs."""

_MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}(:[A-Za-z0-9][A-Za-z0-9._-]{0,31})?")
_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._/:-]*)=(.+)", re.DOTALL)


def load_spec(
    reference: str | Path,
    *,
    weights: str | Path | Sequence[str | Path] | None = None,
    selection: str | Path | None = None,
    example: str | None = None,
) -> ModelSpec:
    """Load the spec that ``reference`` names.

    A TOML file; a built-in model ("digits"); "module:callable"; or any of the three after "NAME=", which sets the id.
    ``weights`` and ``selection`` (files, relative to the current folder) replace the spec's own, and so does
    ``example`` ("1,3,224,224", "1,16:int64", a file, "module:callable"). Raises UnknownModel or SpecError.
    """
    text = str(reference)
    name: str | None = None
    if not Path(text).is_file() and (named := _NAMED.fullmatch(text)):
        name, text = named.group(1), named.group(2)
    path = Path(text)
    folder = Path.cwd()
    if path.is_file() and path.suffix in CODE_OR_WEIGHTS:
        raise SpecError(f"{text} is no spec.{_instead(text)}")
    if path.suffix == ".toml" or path.is_file():
        try:
            table, folder = Table.read(path), path.resolve().parent
        except SpecError as error:
            raise error if path.exists() else SpecError(f"{error}.{_near_specs(path)}") from None
    elif text in BUILT_IN:
        table, folder = Table.read(BUILT_IN[text]), BUILT_IN[text].resolve().parent
    elif looks_like_target(text):
        entries = {"id": name or text.rpartition(":")[2].rpartition(".")[2], "factory": text}
        table = Table(entries, f"model {reference}")
    else:
        raise UnknownModel(
            f'no model "{text}": not built in ({", ".join(BUILT_IN)}), no spec file, and not "module:callable".'
            f"{near(text, BUILT_IN) or _near_specs(path) or _instead(text)}"
        )
    if example is not None:
        table.put("example", entry_of(example))
    spec = spec_from_table(table, folder, model_id=name, weights=weights)
    return spec if selection is None else replace(spec, selection=Path(selection))


def _near_specs(path: Path) -> str:
    """Return a hint for the end of a message: specs in the folder with a similar name."""
    known = [str(one) for one in path.parent.glob("*.toml")]
    return near(str(path) if path.suffix else f"{path}.toml", known, cutoff=0.75)


def _instead(text: str) -> str:
    """Return a hint for the end of a message: how to name the model that may be meant."""
    path = Path(text)
    if path.suffix == ".py":
        return f' A model in a Python file is named "{path.stem}:CALLABLE", from its folder.'
    if path.suffix in CODE_OR_WEIGHTS:
        return " Weights alone are no model: model names what builds it, weights a file of safetensors, .pt or .pth."
    module, dot, name = text.rpartition(".")
    if dot and all(part.isidentifier() for part in text.split(".")):
        return f' Did you mean "{module}:{name}"?'
    return ' One of a library is named as "torchvision.models:resnet18".'


def spec_from_table(
    table: Table,
    folder: Path,
    *,
    model_id: str | None = None,
    weights: str | Path | Sequence[str | Path] | None = None,
) -> ModelSpec:
    """Make the spec of a TOML table whose relative files are in ``folder``; the table must hold nothing else.

    ``model_id`` and ``weights`` replace the table's own. Raises SpecError.
    """
    own_id = table.need("id", str) if model_id is None else table.take("id", str)
    chosen_id = model_id or own_id or ""
    if not _MODEL_ID.fullmatch(chosen_id):
        allowed = 'up to 128 letters, digits and ". _ - /", or these and ":VERSION"'
        table.fail("id", f'expected {allowed}, found "{chosen_id}"')
    factory = table.need("factory", str, '"module:callable"')
    if not looks_like_target(factory):
        table.fail("factory", f'expected "module:callable", found "{factory}"')
    dtype_name = table.choice("dtype", DTYPES, "")
    dtype = DTYPES[dtype_name] if dtype_name else None
    own_weights = _weights(table, folder)
    factory_kwargs = table.table("factory_kwargs")
    call_kwargs = table.table("call_kwargs")
    selection = table.take("selection", str)
    constants = call_kwargs.rest() if call_kwargs else {}
    preprocess: ImagePreprocess | str | None = _target(table, "preprocess", "a table")
    if preprocess is None and (options := table.table("preprocess")):
        preprocess = ImagePreprocess.from_table(options, dtype or torch.float32)
    postprocess: TopK | str | None = _target(table, "postprocess", "a table")
    if postprocess is None and (options := table.table("postprocess")):
        postprocess = TopK.from_table(options)

    def read_image(path: Path) -> Inputs:
        return ModelSpec("example", table.origin, folder, factory, _preprocess=preprocess).preprocess(path)

    example, keywords = read_example(table, folder, read_image)
    if example is None and isinstance(preprocess, ImagePreprocess) and (shape := preprocess.shape):
        example, keywords = example_like(shape, preprocess.dtype, preprocess.keyword)
    spec = ModelSpec(
        model_id=chosen_id,
        origin=table.origin,
        folder=folder,
        factory=factory,
        factory_kwargs=_in_folder(factory_kwargs.rest(), folder) if factory_kwargs else {},
        weights=own_weights if weights is None else _given(weights),
        selection=None if selection is None else folder / selection,
        seed=table.take("seed", int) or 0,
        dtype=dtype,
        call_kwargs=constants,
        tokenizer=table.take("tokenizer", str, '"module:callable" or a folder'),
        labels=read_labels(table.take_any("labels"), folder, table),
        description=table.take("description", str) or "",
        _example=example,
        _keywords=keywords,
        _preprocess=preprocess,
        _postprocess=TopK(strict=False) if postprocess is None else postprocess,
        _drawing=_drawing(table),
    )
    table.done()
    return spec


def _in_folder(value: Any, folder: Path) -> Any:
    """Resolve texts that begin with ./ or ../ as paths from ``folder``; others are unchanged."""
    if isinstance(value, str):
        return os.path.normpath(folder / value) if value in (".", "..") or value.startswith(("./", "../")) else value
    if isinstance(value, dict):
        return {key: _in_folder(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_in_folder(item, folder) for item in value]
    return value


def _given(weights: str | Path | Sequence[str | Path]) -> tuple[Path, ...]:
    return (Path(weights),) if isinstance(weights, (str, Path)) else tuple(Path(file) for file in weights)


def _weights(table: Table, folder: Path) -> tuple[Path, ...]:
    """Read the ``weights`` entry: one file or a list of files, relative to the spec."""
    expected = "expected a safetensors file, or a list of them"
    value = table.take_any("weights")
    files = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        table.fail("weights", f"{expected}, found {kind_of(value)}")
    for file in files:
        if not file.endswith(".safetensors"):
            table.fail("weights", f'{expected}, found "{file}" (other formats can run code when loaded)')
    return tuple(folder / file for file in files)


def _drawing(table: Table) -> Drawing | None:
    options = table.table("draw")
    if options is None:
        return None
    from shared_hooks.models.drawing import Drawing  # few models have it

    return Drawing.from_table(options)


def _target(table: Table, key: str, otherwise: str) -> str | None:
    """Return a key's value if it is "module:callable"; another value is left for its own reader."""
    value = table.peek(key)
    if not isinstance(value, str):
        return None
    if not looks_like_target(value):
        table.fail(key, f'expected {otherwise} or "module:callable", found "{value}"')
    table.take_any(key)
    return value
