"""One model's weights over several processes: tensor parallelism of transformers, for generations.

A worker process is rank 0. It starts the others, passes its tasks to each, and answers for all: every rank runs the
same steps with its own share of the weights, and kernels exchange what they need (`torch.distributed`). If one ends, or
computes something else than the others, the worker ends with all of them, and the server starts new ones.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import torch
import torch.distributed as dist

from cloud_server.models import Computed, EngineSession, Following, ServedModel
from shared_hooks import devices
from shared_hooks.errors import CutRefused, IsthmusError, SessionLost

log = logging.getLogger("cloud_server")

Result = TypeVar("Result")

_IDLE: Final = timedelta(days=3650)
"""How long ranks wait for the next task."""
_ENDED: Final = 70
"""Exit status of a worker whose ranks diverged."""


class RankSessions:
    """The decoding sessions of one process by number. Not thread-safe."""

    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        self._models = models
        self._open: dict[int, EngineSession] = {}

    def begin(self, number: int, model_id: str, cut: str, of: int = 0, following: Following | None = None) -> None:
        """Open session ``number``: a copy of session ``of``, or a new one after the layer ``cut``.

        Raises SessionLost, and as `Engine.open_session`.
        """
        parent = self._open.get(of)
        if of and parent is None:
            raise SessionLost("its worker process does not have it")
        model = self._models[model_id]
        self._open[number] = model.open_session(cut, following) if parent is None else parent.fork()

    def step(self, number: int, header: bytes, payload: bytes | memoryview) -> Computed:
        """Make the session's next step. Raises SessionLost, and as `EngineSession.step`."""
        if number not in self._open:
            raise SessionLost("its worker process does not have it")
        # A session may keep what it was sent for as long as it lives, and shared memory is for data in transit.
        own = memoryview(torch.empty(len(payload), dtype=torch.uint8).numpy())  # type: ignore[arg-type]
        own[:] = payload
        return self._open[number].step(header, own)

    def close(self, numbers: Iterable[int]) -> None:
        """Close sessions; unknown numbers are ignored."""
        for number in numbers:
            self._open.pop(number, None)


class Ranks:
    """All processes of one worker, including this one: a `models.Shards`. All of them call the same methods in the same
    order, except for `close`, which only rank 0 calls.
    """

    def __init__(self, rank: int, store: Path, size: int, device: torch.device, others: Sequence[Any] = ()) -> None:
        """Returns when all processes have met through the file ``store``.

        ``device``: the kind of accelerator, of which each process takes the one with its rank, or the CPU. ``others``:
        this process ends when any of them does.
        """
        self._others, self._closing = others, False
        if others:
            threading.Thread(target=self._watch, name="isthmus-ranks", daemon=True).start()
        on_host = devices.is_host(device)
        self.device = device if on_host else torch.device(device.type, rank)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on one machine
        found = dist.FileStore(str(store), size)  # type: ignore[attr-defined]
        backend = "gloo" if on_host else f"cpu:gloo,{device.type}:nccl"
        dist.init_process_group(backend, store=found, rank=rank, world_size=size)
        self.size = size
        self._rank = rank
        self._group = dist.new_group(backend="gloo", timeout=_IDLE)
        """For messages between the ranks, apart from what kernels exchange."""

    def _watch(self) -> None:
        wait([one.sentinel for one in self._others])
        if not self._closing:
            _end("a process with a share of a model has ended")

    def close(self) -> None:
        """End the other processes."""
        self._closing = True
        for one in self._others:
            one.kill()

    def ready(self) -> None:
        """Wait until all have loaded their models."""
        dist.barrier(self._group)

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's value, in all ranks."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def once(self, make: Callable[[], Result]) -> Result:
        """As `Shards.once`."""
        made: Result = self.broadcast(make() if self._rank == 0 else None)
        return made

    def agree(self, error: IsthmusError | None) -> bool:
        """Return whether a call ended with the same class of error in all ranks, or with none."""
        found: list[str] = [""] * self.size
        dist.all_gather_object(found, "" if error is None else type(error).__name__, group=self._group)
        return len(set(found)) == 1


class LedSessions(RankSessions):
    """The sessions of rank 0, whose calls are made in all ranks."""

    def __init__(self, models: Mapping[str, ServedModel], ranks: Ranks) -> None:
        super().__init__(models)
        self._ranks = ranks

    def begin(self, number: int, model_id: str, cut: str, of: int = 0, following: Following | None = None) -> None:
        if following is not None:
            raise CutRefused(f"{model_id} is divided among processes (--tensor-parallel): it computes to the end")
        self._everywhere("begin", number, model_id, cut, of)

    def step(self, number: int, header: bytes, payload: bytes | memoryview) -> Computed:
        made: Computed = self._everywhere("step", number, header, bytes(payload))
        return made

    def close(self, numbers: Iterable[int]) -> None:
        if known := [number for number in numbers if number in self._open]:
            self._everywhere("close", known)

    def _everywhere(self, name: str, *arguments: Any) -> Any:
        try:
            self._ranks.broadcast((name, arguments))
            result, error = _called(super(), name, arguments)
            alike = self._ranks.agree(error)
        except BaseException as wrong:  # also for an interruption: the other ranks are at another step now
            _end(f"a step of a model in several processes was ended by {type(wrong).__name__}: {wrong}")
        if not alike:
            _end(f"the processes of a model disagree on a step ({error or 'no error here'})")
        if error is not None:
            raise error
        return result


def _called(sessions: Any, name: str, arguments: tuple[Any, ...]) -> tuple[Any, IsthmusError | None]:
    try:
        return getattr(sessions, name)(*arguments), None
    except IsthmusError as error:
        return None, error


def _end(why: str) -> NoReturn:
    log.critical("%s; this worker ends", why)
    os._exit(_ENDED)


def start(program: Callable[[int, Path], object], size: int, device: torch.device) -> Ranks:
    """Make this process rank 0 of ``size``, and start the others: each runs ``program`` with its rank, and the file
    through which they meet.
    """
    if hasattr(os, "memfd_create"):  # ends with this process, however it ends
        store = Path(f"/proc/{os.getpid()}/fd/{os.memfd_create('isthmus-ranks')}")
    else:
        store = Path(tempfile.mkdtemp(), "isthmus-ranks")
    make = multiprocessing.get_context("spawn").Process
    others = [make(target=program, args=(rank, store), daemon=True) for rank in range(1, size)]
    for process in others:
        process.start()
    return Ranks(0, store, size, device, others)


def follow(ranks: Ranks, sessions: RankSessions) -> NoReturn:
    """Repeat rank 0's calls in another rank."""
    ranks.ready()
    while True:
        _, error = _called(sessions, *ranks.broadcast())
        ranks.agree(error)
