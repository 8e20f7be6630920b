"""Weights from safetensors files into a model, strictly: every tensor of the model, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from shared_hooks.errors import SpecError, near


def load_weights(model: nn.Module, files: Sequence[Path], where: str) -> None:
    """Load the tensors of all files into ``model``, in place. Raises as `checked` does."""
    # Names are checked, except those of tied tensors, which load_state_dict would call missing.
    model.load_state_dict(checked(model, files, where), strict=False)


def checked(model: nn.Module, files: Sequence[Path], where: str) -> dict[str, torch.Tensor]:
    """The tensors of all files, which fit ``model``; safetensors reads them where they are used. ``where`` opens the
    messages.

    Tied tensors may be in the files under one of their names only, as safetensors writes them. Raises SpecError for a
    file that is absent or damaged, for a name missing or too much, and for a shape or a dtype that does not fit; a
    dtype fits when the conversion loses nothing (bfloat16 into float32 does, float32 into float16 does not).
    """
    found: dict[str, torch.Tensor] = {}
    for file in files:
        tensors = _read(file, where)
        for name in tensors.keys() & found.keys():
            raise SpecError(f"{where}: {file}: {name} is in more than one weights file")
        found |= tensors
    shown = ", ".join(str(file) for file in files)
    expected = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    _check_names(expected, found, f"{where}: {shown}")
    for name, tensor in found.items():
        wanted = expected[name]
        if tensor.shape != wanted.shape:
            raise SpecError(
                f"{where}: {shown}: {name} has shape {tuple(tensor.shape)}, the model's has {tuple(wanted.shape)}"
            )
        if torch.promote_types(tensor.dtype, wanted.dtype) != wanted.dtype:
            raise SpecError(
                f"{where}: {shown}: {name} is {_dtype(tensor)}, the model's is {_dtype(wanted)}; the conversion would"
                f' lose digits (the spec\'s "dtype" converts the whole model)'
            )
    return found


def _read(file: Path, where: str) -> dict[str, torch.Tensor]:
    try:
        with file.open("rb"):  # safetensors calls a file absent whatever it is that keeps it from opening it
            pass
        return load_file(file)
    except FileNotFoundError:
        raise SpecError(f"{where}: no such weights file: {file}") from None
    except PermissionError:
        raise SpecError(
            f"{where}: {file} cannot be read: permission; make it readable to the user that this runs as (chmod a+r)"
        ) from None
    except (OSError, SafetensorError) as error:
        raise SpecError(f"{where}: {file} is not a safetensors file that can be read: {error}") from error


def _check_names(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], where: str) -> None:
    present = {_storage(expected[name]) for name in found if name in expected}
    missing = [name for name in expected if name not in found and _storage(expected[name]) not in present]
    unexpected = [name for name in found if name not in expected]
    if not missing and not unexpected:
        return
    parts = []
    if missing:
        parts.append(f"{len(missing)} of the model's tensors missing ({_some(missing)})")
    if unexpected:
        parts.append(f"{len(unexpected)} tensors that the model does not have ({_some(unexpected)})")
    meant = f".{near(unexpected[0], expected)}" if unexpected else ""
    raise SpecError(f"{where}: not the weights of this model: {' and '.join(parts)}{meant}")


def _storage(tensor: torch.Tensor) -> object:
    """What tied tensors have in common. Empty tensors share a null pointer without being tied, and so do those that
    have no memory yet.
    """
    if tensor.is_meta:
        return (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
    return (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else id(tensor)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
