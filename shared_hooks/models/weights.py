"""Load weights from files into a model, strictly: all tensors of the model, and no others.

Files are safetensors, or state dictionaries of `torch.save`, which are read with ``weights_only``.
"""

from __future__ import annotations

import bisect
import json
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from shared_hooks import devices
from shared_hooks.errors import SpecError, near
from shared_hooks.state import Dice
from shared_hooks.tensors import tensors_in

log = logging.getLogger(__name__)

# ``--device auto|cpu|cuda[:n]|mps|xpu|...`` and ``--threads N``, the same on both sides.


def pick_device(name: str = "auto") -> torch.device:
    """Return the device called ``name``: a type that torch has ("cpu", "cuda", "xpu", "mps", a plug-in's), with an
    optional index; "auto" is the first accelerator, or the CPU. Raises SpecError for a device that does not exist.
    """
    return devices.pick(name)


MOST_THREADS = 1024


def set_threads(count: int | None) -> int:
    """Set torch's number of threads inside one CPU operation, and return it; None keeps torch's choice.

    Results are bit-identical only with the same number of threads on both sides. Raises SpecError below 1 and above
    `MOST_THREADS`.
    """
    if count is not None:
        if not 1 <= count <= MOST_THREADS:  # OpenMP ends the process where it has no memory for them
            raise SpecError(f"threads must be 1 to {MOST_THREADS}, not {count}")
        torch.set_num_threads(count)
    return torch.get_num_threads()


def load_weights(model: nn.Module, files: Sequence[Path], where: str) -> None:
    """Load the tensors of all files into ``model``, in place. Raises as `checked` does."""
    # Names are checked, except those of tied tensors, which load_state_dict would call missing.
    model.load_state_dict(checked(model, files, where), strict=False)


def checked(model: nn.Module, files: Sequence[Path], where: str) -> dict[str, torch.Tensor]:
    """Return the tensors of all files, checked against ``model``; safetensors reads them lazily. ``where`` prefixes
    messages.

    Tied tensors may be in the files under one of their names only, as safetensors writes them. Raises SpecError for a
    missing or damaged file, for a missing or unexpected name, and for a wrong shape or dtype; a dtype fits if the
    conversion is lossless (bfloat16 into float32 is, float32 into float16 is not).
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
        if is_saved_by_torch(file):  # opened here: safetensors reports any unreadable file as missing
            return _read_saved(file, where)
        return load_file(file)
    except FileNotFoundError:
        raise SpecError(f"{where}: no such weights file: {file}") from None
    except PermissionError:
        raise SpecError(
            f"{where}: {file} cannot be read: permission; make it readable to the user that this runs as (chmod a+r)"
        ) from None
    except (OSError, SafetensorError) as error:
        raise SpecError(f"{where}: {file} is not a safetensors file that can be read: {error}") from error


SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
"""Suffixes of files written by `torch.save`."""
WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts store the state dictionary in a checkpoint."""
CONVERT = "safetensors.torch.save_model(model, 'weights.safetensors')"


def is_saved_by_torch(file: Path) -> bool:
    """Return whether a file is one of `torch.save`'s, by its name or its first bytes (a ZIP archive). Raises
    OSError.
    """
    with file.open("rb") as opened:
        starts = opened.read(4)
    suffix = file.suffix.lower()
    return suffix in SUFFIXES or (starts == b"PK\x03\x04" and suffix != ".safetensors")


def _read_saved(file: Path, where: str) -> dict[str, torch.Tensor]:
    """Read the state dictionary in a file of `torch.save`. Code in it never runs: ``weights_only``, and torch from 2.6
    on, as that could be circumvented before (CVE-2025-32434).
    """
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 6):
        raise SpecError(f"{where}: {file}: this torch ({torch.__version__}) may run code that is in it; {CONVERT}")
    try:
        with file.open("rb") as opened:
            found = torch.load(opened, map_location="cpu", weights_only=True)  # noqa: TID251  # runs no code
    except Exception as error:  # a reader of pickles may raise anything for malformed bytes
        if type(error).__name__ == "UnpicklingError" and "weights_only" in str(error).lower():
            what = (
                "holds a pickled model or other Python objects, which could run code: only a state dictionary is read"
            )
            raise SpecError(
                f"{where}: {file} {what} (torch.save(model.state_dict(), ...), or better {CONVERT})"
            ) from None
        short = str(error).strip().partition("\n")[0][:200]
        raise SpecError(f"{where}: {file} is no file of torch.save's that can be read: {short}") from None
    if isinstance(found, Mapping):
        inner = [found[key] for key in WRAPPERS if isinstance(found.get(key), Mapping)]
        found = inner[0] if len(inner) == 1 else found
    if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
        raise SpecError(f"{where}: {file} holds a {type(found).__name__}, not a state dictionary of named tensors")
    odd = [name for name, value in found.items() if not isinstance(value, torch.Tensor)]
    if odd:
        raise SpecError(f"{where}: {file}: {_some(odd)}: not a tensor; a state dictionary of tensors alone is read")
    log.info("%s is read with weights_only; a safetensors file loads faster and can stay on disk: %s", file, CONVERT)
    if found and all(name.startswith("module.") for name in found):  # of a model in DataParallel
        return {name.removeprefix("module."): value for name, value in found.items()}
    return dict(found)


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
    """Return a key that tied tensors share. Empty tensors, and tensors without memory, have a null pointer in common
    without being tied.
    """
    if tensor.is_meta:
        return (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
    return (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else id(tensor)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# Models whose factory has mapped files, as `from_pretrained` of transformers does.


def into_memory(model: nn.Module) -> None:
    """Copy the tensors of ``model`` that lie in mapped files into memory of its own; tied ones stay tied.

    Writing to such a file would change the model unnoticed, and truncating it would crash the process. Linux only:
    elsewhere mapped memory cannot be detected.
    """
    starts, ends = _mapped()
    found: dict[tuple[int, int], list[torch.Tensor]] = {}
    for tensor in {id(one): one for one in (*model.parameters(), *model.buffers())}.values():
        for part in _parts(tensor):
            memory = part.untyped_storage()
            at = bisect.bisect_right(starts, memory.data_ptr()) - 1
            if at >= 0 and memory.data_ptr() < ends[at]:
                found.setdefault((memory.data_ptr(), memory.nbytes()), []).append(part)
    for together in found.values():
        whole = torch.empty(0, dtype=torch.uint8).set_(together[0].untyped_storage())
        extents = [_extent(part) for part in together]
        begin = min(first for first, _ in extents) & -16
        copy = whole[begin : max(end for _, end in extents)].clone().untyped_storage()
        for part, (first, _) in zip(together, extents, strict=True):
            value = torch.empty(0, dtype=part.dtype)
            part.data = value.set_(copy, (first - begin) // part.itemsize, part.shape, part.stride())


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of its storage that a tensor uses, and the one after the last."""
    first = tensor.storage_offset()
    last = first + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(first) * tensor.itemsize, (int(last) + 1) * tensor.itemsize


def _parts(tensor: Any) -> Iterator[torch.Tensor]:
    """Yield the CPU tensors that make up one: itself, a DTensor's share, a quantised one's numbers and scales."""
    if is_traceable_wrapper_subclass(tensor):
        for part in [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]:  # a DTensor's mesh is one, too
            yield from _parts(part) if isinstance(part, torch.Tensor) else ()
    elif tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.numel() and not tensor.is_quantized:
        yield tensor


def _mapped() -> tuple[list[int], list[int]]:
    """Return where files are mapped in this process: start addresses and end addresses."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return [], []
    found = []
    for line in lines:
        place, _, _, _, inode, *_ = line.split(maxsplit=5)
        if inode != "0":
            start, _, end = place.partition("-")
            found.append((int(start, 16), int(end, 16)))
    return [start for start, _ in found], [end for _, end in found]


# Parameters that stay in their files until they are needed.
#
# A file is mapped: the model's parameters are views of it, equal in every bit. The system reads a page of it on
# access and may evict it at any time, so it costs no memory of its own. Parameters that will be used repeatedly are
# loaded (`MappedWeights.load`): copied into memory on a multiple of 64 bytes, for kernels that are faster there.


class MappedFile:
    """One safetensors file that `checked` has read: https://github.com/huggingface/safetensors#format"""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._mark = _mark(os.fstat(file.fileno()))
            # private: it is never written to, but torch warns of read-only memory
            self._pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        start = 8 + int.from_bytes(self._pages[:8], "little")
        header = json.loads(self._pages[8:start])
        self._begins = {name: start + entry["data_offsets"][0] for name, entry in header.items() if name[:2] != "__"}

    def __contains__(self, name: str) -> bool:
        return name in self._begins

    def view(self, name: str, like: torch.Tensor) -> torch.Tensor | None:
        """Return a view of the named tensor in the file, shaped as ``like``; None if it is not aligned for its type."""
        begin, count = self._begins[name], like.numel()
        if not count or begin % like.dtype.itemsize:
            return None
        return torch.frombuffer(self._pages, dtype=like.dtype, count=count, offset=begin).view(like.shape)

    def check(self) -> None:
        """Raise SpecError if the file was written to since; a file replaced by another keeps its old contents here."""
        try:
            now = _mark(self.path.stat())
        except OSError:  # removed meanwhile: mapped files stay readable
            return
        if now[:2] == self._mark[:2] and now != self._mark:
            raise SpecError(f"{self.path} was changed while its weights are in use; restart (and replace files by mv)")

    def release(self) -> None:
        """Release its pages from memory; they are read again when used."""
        if hasattr(mmap, "MADV_DONTNEED"):  # Linux
            self._pages.madvise(mmap.MADV_DONTNEED)


@dataclass
class Tied:
    """Tied parameters under all their names: the same object, or the same view of the same memory."""

    names: list[str] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)


class MappedWeights:
    """The parameters of one model, in memory or in files. Not thread-safe, but other threads may run the model."""

    def __init__(self, model: nn.Module, files: Sequence[Path], where: str) -> None:
        """Give all tensors of ``model`` their values.

        Raises SpecError, as `checked` does, and for a parameter without memory that is in no file.
        """
        for file in files:
            if file.is_file() and is_saved_by_torch(file):
                raise SpecError(f"{where}: {file} is read whole, only safetensors files can stay on disk: {CONVERT}")
        self._model = model
        found = checked(model, files, where)
        self._files = [MappedFile(file) for file in files]
        self._left: dict[int, tuple[Tied, torch.Tensor]] = {}
        self.total = 0
        """Bytes of all parameters, tied ones once."""
        self.device = devices.CPU
        """Where parameters are loaded."""
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
        """Return a view of its value in a file; None if it must be copied to memory."""
        # of several names the last one counts, as in load_state_dict
        stored = next((name for name in reversed(tied.names) if name in found), None)
        if stored is None or any(type(one) is not nn.Parameter or id(one) in odd for one in tied.parameters):
            return None
        value, like = found[stored], tied.parameters[0]
        if value.dtype != like.dtype or value.stride() != like.stride():
            return None
        return next(file for file in self._files if stored in file).view(stored, like)

    @property
    def loaded(self) -> int:
        """Bytes of the parameters loaded permanently."""
        return self.total - sum({id(tied): view.nbytes for tied, view in self._left.values()}.values())

    def is_loaded(self, parameter: nn.Parameter) -> bool:
        """Return whether it is loaded permanently."""
        return id(parameter) not in self._left

    def load(self, parameters: Iterable[nn.Parameter]) -> None:
        """Load parameters into memory permanently; tied ones stay tied."""
        for parameter in parameters:
            if (left := self._left.get(id(parameter))) is not None:
                tied, view = left
                copy = torch.empty_like(view, device=self.device).copy_(view)
                for number, one in enumerate(tied.parameters):
                    del self._left[id(one)]
                    tied.parameters[number] = _put(self._model, one, copy)

    def place(self, device: torch.device) -> None:
        """Move buffers and loaded parameters to ``device``, where others will be loaded, too."""
        self.device = device
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        for parameter in list(self._model.parameters()):
            if self.is_loaded(parameter):
                _put(self._model, parameter, parameter.detach().to(device))

    def check(self) -> None:
        """Raise SpecError if a file was changed since."""
        for file in self._files:
            file.check()

    def release(self) -> None:
        """Release what was read of the files and is not loaded."""
        for file in self._files:
            file.release()


def _by_memory(model: nn.Module) -> list[list[Tied]]:
    """Return the parameters, grouped by the memory they share."""
    found: dict[object, dict[object, Tied]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        memory, place = _place(parameter)
        tied = found.setdefault(memory, {}).setdefault(place, Tied())
        tied.names.append(name)
        if not any(one is parameter for one in tied.parameters):
            tied.parameters.append(parameter)
    return [list(together.values()) for together in found.values()]


def _place(parameter: nn.Parameter) -> tuple[object, object]:
    """Return the key of a parameter's memory, and its place and layout there. Sparse and empty ones share with no
    other.
    """
    if parameter.layout != torch.strided or not parameter.numel():
        return id(parameter), None
    memory = parameter.untyped_storage()
    place = (parameter.storage_offset(), parameter.shape, parameter.stride(), parameter.dtype)
    # two that were made of the same bytes have storages of their own, with one address
    return (memory._cdata if parameter.is_meta else ("at", memory.data_ptr())), place


def _give_memory(model: nn.Module, together: Sequence[Tied], found: Container[str], where: str) -> None:
    """Allocate memory for parameters that have none, shared as before; load_state_dict fills it."""
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
    """Return the parameter with this value: the same object, so that all references see the value."""
    if torch._has_compatible_shallow_copy_type(parameter, value):
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
    """Return whether loading assigns the file's values to its parameters and does nothing else."""
    loads = type(module)._load_from_state_dict
    return loads.__module__.startswith("torch.nn.") and not module._load_state_dict_pre_hooks


def _mark(about: os.stat_result) -> tuple[int, ...]:
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


# A model built without memory for its parameters: their values come from files afterwards.


def unfilled(build: Callable[[], object]) -> object:
    """Run ``build``, leaving the parameters of the module it returns without memory (device "meta") where that is safe.

    If ``build`` itself reads parameters' values, or draws random numbers for anything that has memory (they would
    differ, as parameters draw none here), it is called once more normally, and all parameters have memory: random
    values of the first call may have gone anywhere, into an array, a number or a closure.
    """
    dice = Dice()
    try:
        with _Drawing() as drawing:
            made = _without_memory(build)
        if isinstance(made, nn.Module):
            if drawing.seen or dice.rolled:
                reason = "it draws random numbers"
            elif any(isinstance(module, torch.jit.ScriptModule) for module in made.modules()):
                reason = "it is scripted"
            elif any(tensor.is_meta for tensor in _outside_state(made)):
                reason = "it keeps tensors that no weights file holds, made of its parameters"
            else:
                return made
        else:
            reason = "it is no module"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    log.info("all parameters are in memory while the model is built: %s", reason)
    dice.restore()
    return build()


class _Drawing(TorchDispatchMode):
    """Detects whether torch draws random numbers for a tensor with memory, even if the generator is restored
    afterwards.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.seen = self.seen or not all(tensor.is_meta for tensor in tensors_in(made))
        return made


def _without_memory(build: Callable[[], object]) -> object:
    thread = threading.get_ident()
    # by address, so that a parameter registered in several places stays one
    known: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def replace(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if threading.get_ident() != thread or type(parameter) is not nn.Parameter or parameter.is_meta:
            return None
        if parameter.layout != torch.strided or not parameter.is_contiguous():
            return None
        kept = known.get(id(parameter))
        if kept is None or kept[0]() is not parameter:
            empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
            known[id(parameter)] = kept = weakref.ref(parameter), empty
        return kept[1]

    handle = register_module_parameter_registration_hook(replace)  # type: ignore[arg-type]  # it may return one
    try:
        return build()
    finally:
        handle.remove()


def _outside_state(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the model's tensors that are neither parameters nor in its state dictionary."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name in module._non_persistent_buffers_set or buffer.is_meta:
                yield buffer
        parameters = {id(parameter) for parameter in module.parameters()}
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from (tensor for tensor in tensors_in(value) if id(tensor) not in parameters)
