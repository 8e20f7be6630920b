"""The memory that outlives a model's forward, put back after runs that are nobody's.

Parameters are too many to be copied for every plan, so a storage is copied before the first kernel that writes to it.
Buffers are copied beforehand (`copies.Buffers`): batch normalisation writes to its own without saying so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shared_hooks.forward import arguments_of
from shared_hooks.recording.kernels import Facts, facts_of, written_by


class MemoryKept(TorchDispatchMode):
    """While this is active, writes to the storages of ``tensors`` are noted; `restore` takes them back."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """See `recorder`: torch's compiler is not to be imported for this."""
        return False

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own: dict[int, torch.Tensor] = {}
        self._was: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        for tensor in tensors:
            key = _key(tensor)
            if key is not None:
                alias = tensor.detach()
                self._own[key] = alias
                self._was.append((tensor, alias, key))

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        facts = facts_of(func)
        if facts.written:
            self._keep_written(facts, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def _keep_written(self, facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if facts.writes_first and args and isinstance(args[0], torch.Tensor):
            self._keep(args[0])
            return
        written, _ = written_by(facts, args, kwargs)
        for tensor in arguments_of(args, kwargs):
            if id(tensor) in written:
                self._keep(tensor)

    def _keep(self, tensor: torch.Tensor) -> None:
        key = _key(tensor)
        if key in self._own and key not in self._before:
            storage = tensor.untyped_storage()
            self._before[key] = storage, storage.clone()

    def changed(self) -> set[int]:
        """Where bytes are others than before, or a tensor is on other memory: addresses of the storages that were."""
        found = {key for key, (now, before) in self._before.items() if not _same_bytes(now, before)}
        return found | {key for tensor, _, key in self._was if _key(tensor) != key}

    def restore(self) -> None:
        """Bytes as they were, and every tensor on the memory that it had."""
        with torch.no_grad():
            for storage, before in self._before.values():
                if storage.nbytes() == before.nbytes():
                    storage.copy_(before, non_blocking=False)
            for tensor, alias, key in self._was:
                if _key(tensor) != key:
                    tensor.data = alias


def _same_bytes(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    flat = [torch.empty(0, dtype=torch.uint8, device=part.device).set_(part) for part in (one, other)]
    return torch.equal(*flat)


def _key(tensor: torch.Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, ValueError):
        return None
