"""A selection as a file: safetensors, with a description in its metadata. Both sides of a cut read the same one.

kind "mask"     tensors keep (int64) and fill (float32), at a module of a model with the weights it was made for
kind "pruned"   the tensors of the smaller model, and the layers whose sizes changed, of a model of that structure
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from shared_hooks.errors import SpecError
from shared_hooks.modules import structure_digest, weights_hash
from shared_hooks.selection.mask import Mask, masked
from shared_hooks.selection.prune import resized, sizes_of

FORMAT: Final = "isthmus-selection"
VERSION: Final = 1
_KEY: Final = "isthmus"


@dataclass(frozen=True)
class Selection:
    """A file that was read: `apply` makes a model of it."""

    path: Path
    about: Mapping[str, Any]
    """kind, layer, channels, kept, and for a mask module and dim."""
    tensors: Mapping[str, torch.Tensor]

    @property
    def is_mask(self) -> bool:
        """Else it is a pruned model, which brings its own weights."""
        return bool(self.about["kind"] == "mask")

    @property
    def mask(self) -> Mask:
        """Raises SpecError where the tensors make none."""
        keep, fill = self.tensors.get("keep"), self.tensors.get("fill")
        if keep is None or fill is None or keep.dtype != torch.int64 or keep.dim() != 1 or fill.dim() != 1:
            raise SpecError(f"{self.path}: a mask has tensors keep (int64) and fill, of one dimension each")
        dim, module = self.about.get("dim"), self.about.get("module")
        if dim not in (1, -1) or not isinstance(module, str):
            raise SpecError(f"{self.path}: a mask names its module and dimension 1 or -1")
        try:
            return Mask(module, dim, tuple(keep.tolist()), tuple(fill.double().tolist()))
        except SpecError as error:
            raise SpecError(f"{self.path}: {error}") from error

    def apply(self, model: nn.Module) -> nn.Module:
        """``model`` itself, masked or made smaller. Raises SpecError for a model that it was not made for."""
        try:
            if structure_digest(model, None) != self.about["structure"]:
                raise SpecError("it was made for a model of another structure")
            if not self.is_mask:
                sizes = self.about.get("sizes")
                if not isinstance(sizes, dict) or not all(isinstance(numbers, dict) for numbers in sizes.values()):
                    raise SpecError("sizes are missing")
                return resized(model, sizes, self.tensors)
            if weights_hash(model) != self.about["weights"]:
                raise SpecError("it was made for a model with other weights")
            return masked(model, self.mask)
        except SpecError as error:
            text = str(error)
            raise error if text.startswith(str(self.path)) else SpecError(f"{self.path}: {text}") from error


def read_selection(path: Path | str) -> Selection:
    """A file of `write_mask` or `write_pruned`. Raises SpecError."""
    path = Path(path)
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})[_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except FileNotFoundError:
        raise SpecError(f"no such selection file: {path}") from None
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise SpecError(f"{path} is not a file of edge-client prune: {error}") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise SpecError(f"{path} is not a file of edge-client prune")
    if about.get("version") != VERSION:
        raise SpecError(f"{path}: version {about.get('version')} of the format; this side reads {VERSION}")
    texts = ("structure", "weights")
    if about.get("kind") not in ("mask", "pruned") or not all(isinstance(about.get(key), str) for key in texts):
        raise SpecError(f"{path}: its metadata is incomplete")
    return Selection(path, about, tensors)


def write_mask(path: Path | str, model: nn.Module, mask: Mask, layer: str = "") -> None:
    """For ``model`` as it is without the mask. Raises SpecError."""
    tensors = {"keep": torch.tensor(mask.keep), "fill": torch.tensor(mask.fill, dtype=torch.float32)}
    about = {"kind": "mask", "layer": layer or mask.module, "module": mask.module, "dim": mask.dim}
    _write(path, model, about | {"channels": len(mask.fill), "kept": len(mask.keep)}, tensors)


def write_pruned(path: Path | str, model: nn.Module, smaller: nn.Module, layer: str = "") -> None:
    """``smaller`` is `pruned` of ``model``. Raises SpecError."""
    before, after = sizes_of(model), sizes_of(smaller)
    sizes = {name: numbers for name, numbers in after.items() if numbers != before.get(name)}
    state = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in smaller.state_dict().items()}
    _write(path, model, {"kind": "pruned", "layer": layer, "sizes": sizes}, state)


def _write(path: Path | str, model: nn.Module, about: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    ours = {"structure": structure_digest(model, None), "weights": weights_hash(model)}
    text = json.dumps({"format": FORMAT, "version": VERSION, **about, **ours})
    try:
        save_file(tensors, path, metadata={_KEY: text})
        os.chmod(path, 0o644)  # safetensors leaves it to the owner alone
    except (OSError, SafetensorError) as error:
        raise SpecError(f"{path} cannot be written: {error}") from error
