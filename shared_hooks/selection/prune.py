"""Remove channels from the layers that make, carry and read them, which leaves a smaller plain model."""

from __future__ import annotations

import copy
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from shared_hooks.errors import CutRefused, SpecError, near
from shared_hooks.files import write_whole
from shared_hooks.modules import ROOT, structure_digest, weights_hash
from shared_hooks.selection.capture import Sample, run
from shared_hooks.selection.channels import CONVOLUTIONS, Space, trace
from shared_hooks.tensors import tensors_in

# A mask at the cut: `Select` keeps the chosen channels, `Restore` fills the others with their calibration means.
#
# A cut after `Select` sends only the kept channels: this follows from liveness, since the mask is part of the model
# on both sides. Every cut stays exact for the masked model; only the masked model differs from the whole one.


@dataclass(frozen=True)
class Mask:
    """The channels of a module's output to keep. ``module`` is a path; ``dim`` the dimension of its channels."""

    module: str
    dim: int
    keep: tuple[int, ...]
    """Channels to keep, ascending."""
    fill: tuple[float, ...]
    """Means of all channels, including kept ones."""

    def __post_init__(self) -> None:
        if not self.keep or list(self.keep) != sorted(set(self.keep)):
            raise SpecError("a mask keeps one channel or more, each once, in ascending order")
        if self.keep[0] < 0 or self.keep[-1] >= len(self.fill):
            raise SpecError(f"a mask of {len(self.fill)} channels cannot keep channel {self.keep[-1]}")
        if not torch.tensor(self.fill).isfinite().all():
            raise SpecError("a mask cannot fill with NaN or Inf")

    @property
    def split(self) -> str:
        """The layer after which only kept channels cross."""
        return f"{self.module}.select"


class Select(nn.Module):
    """Selects channels: (..., C, ...) to (..., kept, ...), as a new tensor."""

    def __init__(self, keep: Sequence[int], channels: int, dim: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.channels = channels
        self.dim = dim
        self.keep: torch.Tensor
        self.register_buffer("keep", torch.tensor(keep, dtype=torch.int64, device=device))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if values.shape[self.dim] != self.channels:
            raise SpecError(f"the mask is for {self.channels} channels, the layer has {values.shape[self.dim]}")
        return values.index_select(self.dim, self.keep)

    def extra_repr(self) -> str:
        return f"{self.keep.numel()} of {self.channels}"


class Restore(nn.Module):
    """Restores channels: (..., kept, ...) to (..., C, ...), with the means in place of the dropped ones."""

    def __init__(self, keep: Sequence[int], fill: torch.Tensor, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.keep: torch.Tensor
        self.fill: torch.Tensor
        self.register_buffer("keep", torch.tensor(keep, dtype=torch.int64, device=fill.device))
        self.register_buffer("fill", fill)

    def forward(self, kept: torch.Tensor) -> torch.Tensor:
        dim = self.dim % kept.dim()
        size = list(kept.shape)
        size[dim] = self.fill.numel()
        shape = [1] * len(size)
        shape[dim] = -1
        return self.fill.to(kept.dtype).view(shape).expand(size).index_copy(dim, self.keep, kept)


class Masked(nn.Module):
    """A module followed by a mask; other attributes are the module's own."""

    def __init__(self, inner: nn.Module, mask: Mask, device: torch.device | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.select = Select(mask.keep, len(mask.fill), mask.dim, device)
        self.restore = Restore(mask.keep, torch.tensor(mask.fill, device=device), mask.dim)
        self.training = inner.training

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        restored: torch.Tensor = self.restore(self.select(self.inner(*args, **kwargs)))
        return restored

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_modules", {}).get("inner")
            if inner is None:
                raise
            return getattr(inner, name)


def masked(model: nn.Module, mask: Mask) -> nn.Module:
    """Add the mask after ``mask.module``, under each of its names, and return ``model`` itself. Raises SpecError."""
    known = dict(model.named_modules(remove_duplicate=False))
    inner = known.get(mask.module)
    if inner is None or mask.module in ("", ROOT):
        raise SpecError(f"the mask is for {mask.module}, which the model does not have.{near(mask.module, known)}")
    weight = next(iter(model.state_dict().values()), None)
    behind = Masked(inner, mask, None if weight is None else weight.device)
    for parent in {id(module): module for module in known.values()}.values():
        for name, child in list(parent._modules.items()):  # named_children omits further names
            if child is inner:
                setattr(parent, name, behind)
    return model


def unmasked(model: nn.Module) -> nn.Module:
    """Remove every mask, and return ``model`` itself."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, Masked) and not isinstance(parent, Masked):
                setattr(parent, name, child.inner)
    return model


def pruned(model: nn.Module, layer: str, keep: Sequence[int], calibration: Sequence[Sample]) -> nn.Module:
    """Return a copy of ``model`` without the channels of ``layer``'s output that are not in ``keep`` (ascending).

    Everything in the channels' space is cut: the convolutions (or linear layers) that make them, all terms of a
    residual sum, normalisations, and the layers that read them. A dropped channel's mean contribution over
    ``calibration`` is added to its readers' bias, which lowers the error (exact except for padding at the border).
    Raises CutRefused, which names the obstacle, also if the smaller model's result differs from the whole one's without
    these channels, and SpecError for an unknown layer or channel.
    """
    if not calibration:
        raise SpecError("pruning needs a calibration input")
    space = space_of(model, layer, calibration[0])
    keep = list(keep)
    if not keep or keep != sorted(set(keep)) or keep[0] < 0 or keep[-1] >= space.channels:
        raise SpecError(f"layer {layer}: keep names channels 0 to {space.channels - 1}, each once, in ascending order")
    means = _means(model, space, calibration)
    made = copy.deepcopy(model)
    index = torch.tensor(keep)
    with torch.no_grad():
        for path in space.makers:
            _cut_output(made.get_submodule(path), index)
        for path in space.carriers:
            _cut_carrier(made.get_submodule(path), index)
        for path, cells in space.readers.items():
            _cut_input(made.get_submodule(path), index, space.channels, cells, means[path])
    _check(model, made, layer, index, space, means, calibration[0])
    return made


def space_of(model: nn.Module, layer: str, sample: Sample) -> Space:
    """Return what is cut along with ``layer``'s channels. Raises CutRefused, which names what binds them, and
    SpecError.
    """
    space = trace(model, sample).space(layer)
    if space.pinned:
        raise CutRefused(f"layer {layer}: its channels are bound to {', '.join(dict.fromkeys(space.pinned))}")
    if not space.readers:
        raise CutRefused(f"layer {layer}: nothing that could be pruned reads its channels")
    return space


def _check(
    model: nn.Module,
    made: nn.Module,
    layer: str,
    index: torch.Tensor,
    space: Space,
    means: Mapping[str, torch.Tensor],
    sample: Sample,
) -> None:
    """Raise CutRefused unless ``made`` returns what ``model`` returns when every reader gets zeros for the dropped
    channels, and the contribution of their means is added to its output.

    The graph does not show everything: code may use a layer's weights or the number of its channels directly.
    """
    handles = []
    for path, cells in space.readers.items():
        module = model.get_submodule(path)
        lost = _lost(index, space.channels, cells)
        given = _given(_weight(module), lost, means[path])

        def before(_module: nn.Module, args: Any, kwargs: Any, lost: torch.Tensor = lost) -> Any:
            value = _input_of(args, kwargs)
            return (value.index_fill(1, lost.nonzero().flatten().to(value.device), 0),), {}

        def after(_module: nn.Module, _args: Any, output: torch.Tensor, given: torch.Tensor = given) -> torch.Tensor:
            return output + given.to(output).view(-1, *[1] * (output.dim() - 2))

        handles += [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
    try:
        with _evaluating(model), _evaluating(made):
            wanted = list(tensors_in(run(model, sample)))
            found = list(tensors_in(run(made, sample)))
    except Exception as error:
        raise CutRefused(f"layer {layer}: the pruned model fails: {type(error).__name__}: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    if len(wanted) != len(found) or not all(map(_nearly_equal, wanted, found)):
        raise CutRefused(
            f"layer {layer}: without these channels the model computes something else: its code uses their number, or"
            f" the weights of their layers, in a way that the graph does not show"
        )


def _nearly_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two outputs are equal up to rounding, relative to the largest magnitude. Of integers, which may
    depend on rounding, only the shape is compared.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    allowed = 5e-2 if a.dtype.itemsize < 4 else 1e-3 if a.device.type == "cpu" else 1e-2  # GPUs may convolve in TF32
    a, b = a.cpu(), b.cpu()
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    same = (a == b) | (a.isnan() & b.isnan())
    if not a.is_floating_point() or same.all():
        return True
    a, b = a.double(), b.double()
    largest = torch.where(a.isfinite(), a, 0).abs().max().item()
    return bool((a - b)[~same].abs().max() <= allowed * max(largest, 1e-6))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode in the block, as dropout would change results."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def sizes_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the constructor arguments of each layer that pruning may change: {path: {"in_channels": 16, ...}}."""
    found: dict[str, dict[str, Any]] = {}
    for path, module in model.named_modules():
        names = _SIZES.get(type(module))
        if names:
            found[path] = {name: getattr(module, name) for name in names}
            found[path]["bias"] = getattr(module, "bias", None) is not None
    return found


def resized(model: nn.Module, sizes: Mapping[str, Mapping[str, Any]], state: Mapping[str, torch.Tensor]) -> nn.Module:
    """Resize the modules in ``sizes`` (changed ones of `sizes_of`), load ``state``, and return ``model`` itself.

    Raises SpecError for what does not fit.
    """
    for path, numbers in sizes.items():
        try:
            module = model.get_submodule(path)
        except AttributeError:
            raise SpecError(f"{path} was pruned, which the model does not have") from None
        for name, value in numbers.items():
            if name == "bias" and type(value) is bool:
                continue
            if (
                name not in _SIZES.get(type(module), ())
                or type(value) is not int
                or not 1 <= value <= _size(module, name)
            ):
                raise SpecError(f"{path}: {name} = {value!r} is not a smaller size of a {type(module).__name__}")
            setattr(module, name, value)
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            shape = _shape(module, name) if tensor.dim() else ()
            _replace(module, name, torch.empty(shape, dtype=tensor.dtype))
        if numbers.get("bias") and getattr(module, "bias", None) is None:
            _replace(module, "bias", torch.empty(_shape(module, "bias"), dtype=_weight(module).dtype))
    try:
        model.load_state_dict(dict(state))
    except RuntimeError as error:
        raise SpecError(f"not the tensors of this model: {error}") from error
    return model


_SIZES: dict[type, tuple[str, ...]] = {
    **dict.fromkeys(CONVOLUTIONS, ("in_channels", "out_channels", "groups")),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), ("num_features",)),
    nn.Linear: ("in_features", "out_features"),
}


def _shape(module: Any, name: str) -> tuple[int, ...]:
    """Return the shape of a tensor of a module whose sizes are set."""
    if isinstance(module, nn.Linear):
        return (module.out_features, module.in_features)[: 2 if name == "weight" else 1]
    if isinstance(module, CONVOLUTIONS):
        whole = (module.out_channels, module.in_channels // module.groups, *module.kernel_size)
        return whole if name == "weight" else whole[:1]
    return (module.num_features,)


def _size(module: Any, name: str) -> int:
    return int(getattr(module, name))


def _weight(module: nn.Module) -> torch.Tensor:
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    return weight


def _replace(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    if name in module._buffers:
        module._buffers[name] = tensor
    else:
        module._parameters[name] = nn.Parameter(tensor, requires_grad=False)


def _cut_output(module: nn.Module, index: torch.Tensor) -> None:
    for name in ("weight", "bias"):
        tensor = getattr(module, name)
        if tensor is not None:
            _replace(module, name, tensor.index_select(0, index.to(tensor.device)))
    setattr(module, "out_features" if isinstance(module, nn.Linear) else "out_channels", len(index))


def _cut_carrier(module: nn.Module, index: torch.Tensor) -> None:
    """Cut a batch normalisation, or a depthwise convolution."""
    for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        if tensor.dim() > 0:  # not the count of batches
            _replace(module, name, tensor.index_select(0, index.to(tensor.device)))
    numbers = ("in_channels", "out_channels", "groups") if isinstance(module, CONVOLUTIONS) else ("num_features",)
    for name in numbers:
        setattr(module, name, len(index))


def _cut_input(module: nn.Module, index: torch.Tensor, channels: int, cells: int, mean: torch.Tensor) -> None:
    """Cut the inputs of a layer. ``mean``: of each input feature, (channels,) or (channels * cells,)."""
    weight = _weight(module)
    given = _given(weight, _lost(index, channels, cells), mean)
    features = (index[:, None] * cells + torch.arange(cells)).flatten().to(weight.device)
    bias: Any = module.bias
    before = torch.zeros(len(weight), dtype=torch.float64) if bias is None else bias.detach().double().cpu()
    _replace(module, "weight", weight.index_select(1, features))
    _replace(module, "bias", (before + given).to(weight))
    setattr(module, "in_features" if isinstance(module, nn.Linear) else "in_channels", len(features))


def _lost(index: torch.Tensor, channels: int, cells: int) -> torch.Tensor:
    """Return whether each input feature is dropped."""
    dropped = torch.ones(channels, dtype=torch.bool)
    dropped[index] = False
    return dropped.repeat_interleave(cells)


def _given(weight: torch.Tensor, lost: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return the mean contribution of the dropped features to each output: (outputs,) float64 on the CPU."""
    whole = (weight.detach().double().flatten(2).sum(2) if weight.dim() > 2 else weight.detach().double()).cpu()
    return whole[:, lost] @ mean[lost]


def _input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Return the single tensor argument of a layer's call, positional or by name."""
    value: torch.Tensor = args[0] if args else next(iter(kwargs.values()))
    return value


def _means(model: nn.Module, space: Space, calibration: Iterable[Sample]) -> dict[str, torch.Tensor]:
    """Return the mean of each input channel (for a linear layer: feature) of the readers, float64 on the CPU."""
    sums: dict[str, list[Any]] = defaultdict(lambda: [0, 0.0])
    handles = []
    for path in space.readers:

        def hook(_module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            values = _input_of(args, kwargs).detach().double().cpu().transpose(0, 1).flatten(1)
            sums[path][0] += values.shape[1]
            sums[path][1] = sums[path][1] + values.sum(1)

        handles.append(model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True))
    try:
        for sample in calibration:
            run(model, sample)
    finally:
        for handle in handles:
            handle.remove()
    return {path: total / count for path, (count, total) in sums.items()}


# A selection as a file: safetensors, with a description in its metadata. Both sides of a cut read the same one.
#
# kind "mask" tensors keep (int64) and fill (float32), at a module of a model with the weights it was made for kind
# "pruned" the tensors of the smaller model, and the layers whose sizes changed, of a model of that structure


FORMAT: Final = "isthmus-selection"
VERSION: Final = 1
_KEY: Final = "isthmus"


@dataclass(frozen=True)
class Selection:
    """A selection read from a file: `apply` applies it to a model."""

    path: Path
    about: Mapping[str, Any]
    """kind, layer, channels, kept, and for a mask module and dim."""
    tensors: Mapping[str, torch.Tensor]

    @property
    def is_mask(self) -> bool:
        """Whether it is a mask; else it is a pruned model with its own weights."""
        return bool(self.about["kind"] == "mask")

    @property
    def mask(self) -> Mask:
        """Return the mask. Raises SpecError if the tensors are invalid."""
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
        """Mask or shrink ``model``, and return it. Raises SpecError for a model that it was not made for."""
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
    """Read a file of `write_mask` or `write_pruned`. Raises SpecError."""
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
    """Write a mask for ``model``, given without it. Raises SpecError."""
    tensors = {"keep": torch.tensor(mask.keep), "fill": torch.tensor(mask.fill, dtype=torch.float32)}
    about = {"kind": "mask", "layer": layer or mask.module, "module": mask.module, "dim": mask.dim}
    _write(path, model, about | {"channels": len(mask.fill), "kept": len(mask.keep)}, tensors)


def write_pruned(path: Path | str, model: nn.Module, smaller: nn.Module, layer: str = "") -> None:
    """Write ``smaller``, which is `pruned` of ``model``. Raises SpecError."""
    before, after = sizes_of(model), sizes_of(smaller)
    sizes = {name: numbers for name, numbers in after.items() if numbers != before.get(name)}
    state = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in smaller.state_dict().items()}
    _write(path, model, {"kind": "pruned", "layer": layer, "sizes": sizes}, state)


def _write(path: Path | str, model: nn.Module, about: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    ours = {"structure": structure_digest(model, None), "weights": weights_hash(model)}
    text = json.dumps({"format": FORMAT, "version": VERSION, **about, **ours})

    def fill(file: Path) -> None:
        save_file(tensors, file, metadata={_KEY: text})
        os.chmod(file, 0o644)  # safetensors makes it readable by its owner only

    try:
        write_whole(path, fill)
    except SafetensorError as error:
        raise SpecError(f"{path} cannot be written: {error}") from error
