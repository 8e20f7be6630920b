"""Parameters that stay in their files until they are needed.

A file is mapped: the model's parameters are views of it, true in every bit. The system reads a page of it where
somebody looks and may take it back at any time, so it costs no memory of its own. What shall be used again and again is
loaded (`MappedWeights.load`): copied into memory on a multiple of 64 bytes, for kernels round by it.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn

from shared_hooks.errors import SpecError
from shared_hooks.models.weights import checked


class MappedFile:
    """One safetensors file, which `checked` has read before: https://github.com/huggingface/safetensors#format"""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._mark = _mark(os.fstat(file.fileno()))
            # private: nobody writes to it, but torch warns of memory that cannot be written
            self._pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        start = 8 + int.from_bytes(self._pages[:8], "little")
        header = json.loads(self._pages[8:start])
        self._begins = {name: start + entry["data_offsets"][0] for name, entry in header.items() if name[:2] != "__"}

    def __contains__(self, name: str) -> bool:
        return name in self._begins

    def view(self, name: str, like: torch.Tensor) -> torch.Tensor | None:
        """The tensor of this name in the file, of the form of ``like``; None where it lies askew for its type."""
        begin, count = self._begins[name], like.numel()
        if not count or begin % like.dtype.itemsize:
            return None
        return torch.frombuffer(self._pages, dtype=like.dtype, count=count, offset=begin).view(like.shape)

    def check(self) -> None:
        """SpecError if the file was written to since; one that another was put in place of stays as it was."""
        try:
            now = _mark(self.path.stat())
        except OSError:  # taken away: what is mapped stays
            return
        if now[:2] == self._mark[:2] and now != self._mark:
            raise SpecError(f"{self.path} was changed while its weights are in use; restart (and replace files by mv)")

    def release(self) -> None:
        """Give its pages back; who looks again reads the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):  # Linux
            self._pages.madvise(mmap.MADV_DONTNEED)


class MappedWeights:
    """The parameters of one model, in memory or in files. Not safe with threads: one calls at a time, while others may
    run the model.
    """

    def __init__(self, model: nn.Module, files: Sequence[Path], where: str) -> None:
        """Gives all tensors of ``model`` their values. Raises SpecError, as `checked` does."""
        found = checked(model, files, where)
        self._files = [MappedFile(file) for file in files]
        self._left: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
        self.total = sum(parameter.nbytes for parameter in model.parameters())
        """Bytes of all parameters."""
        odd = {id(parameter) for module in model.modules() if not _plain(module) for parameter in module.parameters()}
        names: dict[int, list[str]] = {}
        parameters = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in parameters.items():
            names.setdefault(id(parameter), []).append(name)
        for parameter in list(model.parameters()):
            # under several names the last one counts, as load_state_dict has it
            stored = next((name for name in reversed(names[id(parameter)]) if name in found), None)
            if stored is None or id(parameter) in odd or type(parameter) is not nn.Parameter:
                if parameter.is_meta:
                    _put(model, parameter, torch.empty_like(parameter, device="cpu"))
                continue  # load_state_dict below
            value, view = found[stored], None
            for name in names[id(parameter)]:
                found.pop(name, None)
            if value.dtype == parameter.dtype and value.stride() == parameter.stride():
                view = next(file for file in self._files if stored in file).view(stored, parameter)
            if view is None:
                _put(model, parameter, torch.empty_like(parameter, device="cpu").copy_(value))
            else:
                parameter = _put(model, parameter, view)
                self._left[id(parameter)] = parameter, view
        model.load_state_dict(found, strict=False)

    @property
    def loaded(self) -> int:
        """Bytes of the parameters that are in memory for good."""
        return self.total - sum(view.nbytes for _, view in self._left.values())

    def is_loaded(self, parameter: nn.Parameter) -> bool:
        """Whether it is in memory for good."""
        return id(parameter) not in self._left

    def load(self, parameters: Iterable[nn.Parameter]) -> None:
        """Into memory of their own, for good."""
        for parameter in parameters:
            if (left := self._left.pop(id(parameter), None)) is not None:
                parameter.data = torch.empty_like(left[1]).copy_(left[1])

    def check(self) -> None:
        """SpecError if a file was changed since."""
        for file in self._files:
            file.check()

    def release(self) -> None:
        """Give back what was read of the files and is not loaded."""
        for file in self._files:
            file.release()


def _put(model: nn.Module, parameter: nn.Parameter, value: torch.Tensor) -> nn.Parameter:
    """The parameter with this value; the same object, so that whoever holds it has the value, too."""
    if not parameter.is_meta:
        parameter.data = value
        return parameter
    filled = nn.Parameter(value, requires_grad=parameter.requires_grad)
    try:
        torch.utils.swap_tensors(parameter, filled)
        return parameter
    except RuntimeError:  # held weakly: torch's recurrent layers do, and notice another one
        for module in model.modules():
            for name, one in list(module._parameters.items()):
                if one is parameter:
                    setattr(module, name, filled)
        return filled


def _plain(module: nn.Module) -> bool:
    """Whether loading gives its parameters the values of the file and nothing else."""
    loads = type(module)._load_from_state_dict
    return loads.__module__.startswith("torch.nn.") and not module._load_state_dict_pre_hooks


def _mark(about: os.stat_result) -> tuple[int, ...]:
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
