"""From what names a model to its spec: a file, a built-in name, a callable. docs/model-spec.md describes the format."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shared_hooks.config import Table, kind_of, looks_like_target
from shared_hooks.errors import SpecError, UnknownModel, near
from shared_hooks.models.images import DTYPES, ImagePreprocess
from shared_hooks.models.inputs import Inputs, entry_of, example_like, read_example
from shared_hooks.models.predictions import TopK, read_labels
from shared_hooks.models.spec import ModelSpec

if TYPE_CHECKING:
    from shared_hooks.models.drawing import Drawing

BUILT_IN: Mapping[str, Path] = {"digits": Path(__file__).parent / "digits" / "digits.toml"}
"""The models that ship with Isthmus, by name."""

CODE_OR_WEIGHTS = frozenset({".py", ".pt", ".pth", ".bin", ".ckpt", ".onnx", ".safetensors"})
"""Suffixes of files that people take for specs."""

_MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}(:[A-Za-z0-9][A-Za-z0-9._-]{0,31})?")
_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._/:-]*)=(.+)", re.DOTALL)


def load_spec(
    reference: str | Path,
    *,
    weights: str | Path | Sequence[str | Path] | None = None,
    selection: str | Path | None = None,
    example: str | None = None,
) -> ModelSpec:
    """The spec that ``reference`` names.

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
    """For the end of a message: specs in its folder that are named nearly as it is."""
    known = [str(one) for one in path.parent.glob("*.toml")]
    return near(str(path) if path.suffix else f"{path}.toml", known, cutoff=0.75)


def _instead(text: str) -> str:
    """For the end of a message: how the model that is perhaps meant is named."""
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
    """The spec of a TOML table whose relative files lie in ``folder``; the table must hold nothing else.

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
    """``value`` with texts that begin with ./ or ../ as paths from ``folder``; others say nothing."""
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
    """The ``weights`` entry: one file or a list of files, relative to the spec."""
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
    """A key that is either "module:callable" or something else, which is left for its own reader."""
    value = table.peek(key)
    if not isinstance(value, str):
        return None
    if not looks_like_target(value):
        table.fail(key, f'expected {otherwise} or "module:callable", found "{value}"')
    table.take_any(key)
    return value
