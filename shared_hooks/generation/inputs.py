"""The inputs of a step on the wire.

Of a *private* input (token ids, embeddings, pixels) the form travels and nothing else. Of others, the *shared* ones
(masks, positions, an encoder's output), what is new since the step before.

    ["p", shape, stride, dtype]  private      ["="]  as before     ["+", columns]  as before, and these columns more
    ["i", values, dtype]  a few integers      ["s", number]  the tensor of that number in the message
"""

from __future__ import annotations

import re
from typing import Any

import torch

from shared_hooks.errors import MALFORMED, BadFrame, InputMismatch
from shared_hooks.generation.allowance import magnitude, weight
from shared_hooks.generation.forms import check_sizes, version_of
from shared_hooks.generation.holders import is_state
from shared_hooks.generation.remote_tensor import Origin, RemoteTensor
from shared_hooks.tensors import ClassFinder, dtype_name, dtype_named, flatten, tensors_in, unflatten

FEW = 64
MOST_COLUMNS = 16
_INTEGER_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PRIVATE = re.compile(r"input_ids|embeds|pixel|feature|input_values|image|audio|video|spectrogram|waveform")
_SHARED = re.compile(r"mask|position|grid|sizes|lengths|token_type|_idx$|cache")


def is_private(name: str) -> bool:
    """Whether an input of that name never leaves this side, if nobody says otherwise."""
    return _PRIVATE.search(name) is not None and _SHARED.search(name) is None


class Said:
    """The edge's side: what has been said of the inputs."""

    def __init__(self, private: frozenset[str] | None = None) -> None:
        self._private = private
        self._structure: Any = None
        self._forms: Any = None
        self._last: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self.leaves: list[torch.Tensor] = []
        """The tensors of the last inputs."""

    def say(self, kwargs: dict[str, Any], header: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        """Add a step's inputs to a message. Raises `UnknownHolder`."""
        structure, leaves, names = [], [], []
        for name, value in kwargs.items():
            if is_state(value):
                structure.append([name, 0])
                continue
            part, found = flatten(value)
            structure.append([name, part, len(found)])
            leaves += found
            names += [name] * len(found)
        forms = [
            self._form(number, leaf, name, tensors)
            for number, (leaf, name) in enumerate(zip(leaves, names, strict=True))
        ]
        self.leaves = leaves
        if structure != self._structure:
            header["in"] = self._structure = structure
        if forms != self._forms or any(form[0] == "s" for form in forms):
            header["f"] = forms
        self._forms = forms

    def shared(self, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors among a step's inputs that the other side gets."""
        values = {name: value for name, value in kwargs.items() if not is_state(value) and not self._is_private(name)}
        return list(tensors_in(values))

    def _is_private(self, name: str) -> bool:
        return is_private(name) if self._private is None else name in self._private

    def _form(self, number: int, leaf: torch.Tensor, name: str, tensors: list[torch.Tensor]) -> Any:
        if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
            raise InputMismatch(f'the input "{name}" holds a {type(leaf).__name__}: pass plain tensors')
        if self._is_private(name):
            return ["p", list(leaf.shape), list(leaf.stride()), dtype_name(leaf.dtype), name]
        known = self._last.get(number)
        try:
            if known is not None:
                tensor, version, content = known
                if _same(content, leaf) if content is not tensor else tensor is leaf and version == version_of(leaf):
                    return ["="]
                columns = _grown(content, leaf)
                if columns is not None:
                    return ["+", columns]
                if leaf.numel() <= FEW and not leaf.is_floating_point() and not leaf.is_complex():
                    return ["i", leaf.tolist(), dtype_name(leaf.dtype)]
            tensors.append(leaf)
            return ["s", len(tensors) - 1]
        finally:
            # a caller may go on writing to it, and not only by torch, which counts that
            most = FEW * FEW if leaf.is_floating_point() or leaf.is_complex() else FEW * FEW * FEW
            content = leaf.clone() if leaf.numel() <= most else leaf
            self._last[number] = leaf, version_of(leaf), content

    def copied(self) -> Said:
        """For a session that continues from here on its own."""
        made = Said(self._private)
        made._structure, made._forms, made._last = self._structure, self._forms, dict(self._last)
        return made


def _same(old: torch.Tensor, new: torch.Tensor) -> bool:
    form = old.dtype == new.dtype and old.shape == new.shape and old.stride() == new.stride()
    return form and torch.equal(_bits(old), _bits(new))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of numbers: two zeros are equal as numbers, and NaN is not."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGER_OF[tensor.itemsize]) if tensor.is_floating_point() else tensor


def _grown(old: torch.Tensor, new: torch.Tensor) -> Any:
    """The columns that ``new`` has beyond ``old``; None where it is something else."""
    if new.is_floating_point() or new.dim() < 1 or new.dim() != old.dim() or new.dtype != old.dtype:
        return None
    more = new.shape[-1] - old.shape[-1]
    if not 0 < more <= MOST_COLUMNS or new.numel() > FEW * FEW * FEW or new.shape[:-1] != old.shape[:-1]:
        return None
    return new[..., -more:].tolist() if torch.equal(new[..., :-more], old) else None


class Heard:
    """The cloud's side: the inputs of the step before, and this one's."""

    def __init__(self, here: torch.device, find: ClassFinder) -> None:
        self._here = here
        self._find = find
        self._structure: Any = None
        self._forms: Any = None
        self._last: dict[int, torch.Tensor] = {}
        self._told: Any = None
        self._structures: Any = None
        self.leaves: list[torch.Tensor] = []

    def hear(self, header: dict[str, Any], tensors: list[torch.Tensor], state: Any) -> tuple[dict[str, Any], int]:
        """The inputs of a step, and how many of the tensors are theirs. Raises BadFrame, TooLarge."""
        self._structure = header.get("in", self._structure)
        self._forms = header.get("f", self._forms)
        if self._structure is None or self._forms is None:
            raise BadFrame("a step without inputs")
        used = 0
        try:
            self.leaves = []
            self._last = {number: leaf for number, leaf in self._last.items() if number < len(self._forms)}
            for number, form in enumerate(self._forms):
                leaf = self._leaf(number, form, tensors)
                used += form[0] == "s"
                if form[0] != "p":
                    self._last[number] = leaf
                self.leaves.append(leaf)
            kwargs, at = {}, 0
            for name, part, *count in self._structure:
                if part == 0:
                    kwargs[str(name)] = state
                    continue
                kwargs[str(name)] = unflatten(part, self.leaves[at : at + count[0]], self._find)
                at += count[0]
        except (*MALFORMED, RuntimeError) as error:
            raise BadFrame(f"malformed inputs of a step: {error!s:.120}") from error
        return kwargs, used

    def magnitude(self) -> Any:
        """See `allowance.magnitude`: of what was reported, and of the tensors' sizes."""
        if self._told is not self._structure:
            self._told, self._structures = self._structure, magnitude(self._structure)
        return self._structures, magnitude(self._forms), [[*map(int.bit_length, leaf.shape)] for leaf in self.leaves]

    def tensors(self) -> list[torch.Tensor]:
        """Those that are kept for the next step."""
        return list(self._last.values())

    @property
    def nbytes(self) -> int:
        """About what the rest takes in memory."""
        return 2 * weight(self._structure) + weight(self._forms)

    def _leaf(self, number: int, form: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
        kind = form[0]
        if kind == "p":
            shape, stride = tuple(form[1]), tuple(form[2])
            check_sizes(shape, stride)
            return RemoteTensor(
                shape, stride, dtype_named(form[3]), self._here, Origin("input", str(form[4]), 0, number)
            )
        if kind == "=":
            return self._last[number]
        if kind == "+":
            old = self._last[number]
            return torch.cat([old, torch.tensor(form[1], dtype=old.dtype, device=self._here)], dim=-1)
        if kind == "i":
            return torch.tensor(form[1], dtype=dtype_named(form[2]), device=self._here)
        found: torch.Tensor = tensors[form[1]]
        return found

    def copied(self) -> Heard:
        """For a fork."""
        made = Heard(self._here, self._find)
        made._structure, made._forms, made._last = self._structure, self._forms, dict(self._last)
        return made

    def names_of_state(self) -> int:
        """How many inputs are states."""
        return sum(part[1] == 0 for part in self._structure or ())
