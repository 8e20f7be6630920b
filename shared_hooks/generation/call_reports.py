"""What the edge tells of the calls before the cut, and the remote tensors that stand for what they gave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shared_hooks.errors import MALFORMED, BadFrame
from shared_hooks.generation.allowance import magnitude, weight
from shared_hooks.generation.forms import check_sizes
from shared_hooks.generation.remote_tensor import Origin, RemoteTensor
from shared_hooks.tensors import ClassFinder, dtype_named, flatten, unflatten

MAX_CALLS = 100_000
REMOTE_BYTES = 2048
"""Memory that a tensor without data takes, and a call."""


@dataclass(frozen=True)
class CallReport:
    """One call: its result is rebuilt from ``structure`` and ``sources``, a remote tensor or the number of an argument
    each.
    """

    path: str
    structure: Any
    sources: tuple[RemoteTensor | int, ...]
    inner: tuple[CallReport, ...]

    def result(self, given: list[torch.Tensor], find: ClassFinder) -> Any:
        """As the module would give it. Raises BadFrame."""
        try:
            leaves = [given[source] if isinstance(source, int) else source for source in self.sources]
        except IndexError:
            raise BadFrame(f"{self.path} is said to give an argument that it is not given") from None
        return unflatten(self.structure, leaves, find)

    def completed(self, output: Any, find: ClassFinder) -> Any:
        """What the module gave when run on remote tensors, with ours in their place, whose values can be had."""
        structure, leaves = flatten(output)
        if len(leaves) != len(self.sources) or not any(type(leaf) is RemoteTensor for leaf in leaves):
            return output
        pairs = zip(leaves, self.sources, strict=True)
        swapped = [
            ours if type(leaf) is RemoteTensor and isinstance(ours, RemoteTensor) else leaf for leaf, ours in pairs
        ]
        return unflatten(structure, swapped, find)


class CallReports:
    """All calls of a step, by path and count."""

    def __init__(self, here: torch.device) -> None:
        self._here = here
        self._left = 0
        self.calls: dict[tuple[str, int], CallReport] = {}
        self._sizes: dict[tuple[str, int], tuple[Any, int]] = {}

    def hear(self, reported: Any) -> None:
        """What has changed since the step before. Raises BadFrame."""
        self._left = MAX_CALLS - len(self.calls)
        try:
            for one in reported:
                key = str(one[0]), int(one[1])
                self.calls[key] = self._call(one)
                self._sizes[key] = magnitude(one), 2 * weight(one) + REMOTE_BYTES * _count(self.calls[key])
        except MALFORMED as error:
            raise BadFrame(f"malformed forms of calls before the cut: {error!s:.120}") from error

    @property
    def nbytes(self) -> int:
        """About what it takes in memory."""
        return sum([nbytes for _, nbytes in self._sizes.values()])

    def magnitude(self) -> Any:
        """See `allowance.magnitude`."""
        return frozenset([(key, found) for key, (found, _) in self._sizes.items()])

    def copied(self) -> CallReports:
        """For a step that may fail."""
        made = CallReports(self._here)
        made.calls, made._sizes = dict(self.calls), dict(self._sizes)
        return made

    def _call(self, reported: Any) -> CallReport:
        self._left -= 1
        if self._left < 0:
            raise ValueError("too many")
        path, count, structure, sources, inner = reported
        made = [self._source(one, Origin("call", str(path), int(count), n)) for n, one in enumerate(sources)]
        return CallReport(str(path), structure, tuple(made), tuple([self._call(one) for one in inner]))

    def _source(self, source: Any, origin: Origin) -> RemoteTensor | int:
        if type(source) is int:
            return source
        shape, stride, dtype = tuple(source[0]), tuple(source[1]), dtype_named(source[2])
        check_sizes(shape, stride)
        return RemoteTensor(shape, stride, dtype, self._here, origin)


def _count(call: CallReport) -> int:
    return 1 + len(call.sources) + sum(map(_count, call.inner))
