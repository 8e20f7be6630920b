"""Parameters that stay in their files until they are needed.

A file is mapped: the model's parameters are views of it, true in every bit. The system reads a page of it where
somebody looks and may take it back at any time, so it costs no memory of its own. What shall be used again and again is
loaded (`MappedWeights.load`): copied into memory on a multiple of 64 bytes, for kernels round by it.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass
class Tied:
    """Parameters that are one tensor, under all their names: the same object, or the same memory seen alike."""

    names: list[str] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)


class MappedWeights:
    """The parameters of one model, in memory or in files. Not safe with threads: one calls at a time, while others may
    run the model.
    """

    def __init__(self, model: nn.Module, files: Sequence[Path], where: str) -> None:
        """Gives all tensors of ``model`` their values. Raises SpecError, as `checked` does, and for a parameter without
        memory that no file has a value for.
        """
        found = checked(model, files, where)
        self._files = [MappedFile(file) for file in files]
        self._left: dict[int, tuple[Tied, torch.Tensor]] = {}
        self.total = 0
        """Bytes of all parameters, tied ones once."""
        odd = {id(parameter) for module in model.modules() if not _plain(module) for parameter in module.parameters()}
        for together in _by_memory(model):
            self.total += sum(one.parameters[0].nbytes for one in together)
            if len(together) == 1 and (view := self._view(together[0], found, odd)) is not None:
                tied = together[0]
                tied.parameters = [_put(model, parameter, view) for parameter in tied.parameters]
                self._left |= {id(parameter): (tied, view) for parameter in tied.parameters}
                for name in tied.names:
                    found.pop(name, None)
            else:
                _give_memory(model, together, found, where)
        model.load_state_dict(found, strict=False)

    def _view(self, tied: Tied, found: Mapping[str, torch.Tensor], odd: Container[int]) -> torch.Tensor | None:
        """Its value as it lies in a file; None for what must be made in memory."""
        # under several names the last one counts, as load_state_dict has it
        stored = next((name for name in reversed(tied.names) if name in found), None)
        if stored is None or any(type(one) is not nn.Parameter or id(one) in odd for one in tied.parameters):
            return None
        value, like = found[stored], tied.parameters[0]
        if value.dtype != like.dtype or value.stride() != like.stride():
            return None
        return next(file for file in self._files if stored in file).view(stored, like)

    @property
    def loaded(self) -> int:
        """Bytes of the parameters that are in memory for good."""
        return self.total - sum({id(tied): view.nbytes for tied, view in self._left.values()}.values())

    def is_loaded(self, parameter: nn.Parameter) -> bool:
        """Whether it is in memory for good."""
        return id(parameter) not in self._left

    def load(self, parameters: Iterable[nn.Parameter]) -> None:
        """Into memory of their own, for good; what is tied stays so."""
        for parameter in parameters:
            if (left := self._left.get(id(parameter))) is not None:
                tied, view = left
                copy = torch.empty_like(view).copy_(view)
                for one in tied.parameters:
                    one.data = copy
                    del self._left[id(one)]

    def check(self) -> None:
        """SpecError if a file was changed since."""
        for file in self._files:
            file.check()

    def release(self) -> None:
        """Give back what was read of the files and is not loaded."""
        for file in self._files:
            file.release()


def _by_memory(model: nn.Module) -> list[list[Tied]]:
    """The parameters, those that lie in the same memory together."""
    found: dict[object, dict[object, Tied]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        memory, place = _place(parameter)
        tied = found.setdefault(memory, {}).setdefault(place, Tied())
        tied.names.append(name)
        if not any(one is parameter for one in tied.parameters):
            tied.parameters.append(parameter)
    return [list(together.values()) for together in found.values()]


def _place(parameter: nn.Parameter) -> tuple[object, object]:
    """The memory that a parameter lies in, and where and how; a sparse one, or one without elements, is on its own."""
    if parameter.layout != torch.strided or not parameter.numel():
        return id(parameter), None
    memory = parameter.untyped_storage()
    place = (parameter.storage_offset(), parameter.shape, parameter.stride(), parameter.dtype)
    # two that were made of the same bytes have storages of their own, with one address
    return (memory._cdata if parameter.is_meta else ("at", memory.data_ptr())), place


def _give_memory(model: nn.Module, together: Sequence[Tied], found: Container[str], where: str) -> None:
    """Memory for parameters that have none, shared as before; load_state_dict fills it."""
    memory: torch.UntypedStorage | None = None
    for tied in together:
        for number, parameter in enumerate(tied.parameters):
            if not parameter.is_meta:
                continue
            if not any(name in found for name in tied.names):
                raise SpecError(f"{where}: {tied.names[0]} cannot be left in a file: none has a value under its name")
            if memory is None:
                memory = torch.empty(parameter.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage()
            value = torch.empty(0, dtype=parameter.dtype)
            value.set_(memory, parameter.storage_offset(), parameter.shape, parameter.stride())
            tied.parameters[number] = _put(model, parameter, value)


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
