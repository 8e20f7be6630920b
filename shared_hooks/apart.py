"""A model in a process of its own, for `verify`: what one process shares between models (globals, attributes of
classes, settings, generators) hides nothing there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from shared_hooks.crossing import EarlyOutput
from shared_hooks.errors import IsthmusError, ModelFailed
from shared_hooks.forward import run_plain
from shared_hooks.state import Dice

Make = Callable[[], nn.Module]
SECONDS = 5.0
"""For a process to end by itself."""


class Gone(Exception):
    """The process cannot be asked: it has ended, or what it is to be sent or to answer goes to no other process. That
    says nothing about the model's answer.
    """


class Apart:
    """One process. ``make`` is called there, and ``wrap`` for what runs tails of the model. As always with Python's
    ``multiprocessing``, both must be importable there, and a script guards what it runs by
    ``if __name__ == "__main__"``. Use as a context manager. Raises `Gone` where they are not.
    """

    def __init__(self, make: Make, wrap: Callable[[nn.Module], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_answer, args=(theirs, make, wrap, torch.get_num_threads()), daemon=True, name="isthmus-verify"
        )
        try:
            self._process.start()
        except Exception as error:
            self._pipe.close()
            raise Gone(f"the model cannot be made in another process: {error!s:.200}") from error
        finally:
            theirs.close()

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(SECONDS)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._process.close()

    def whole(self, args: tuple[Any, ...], kwargs: dict[str, Any], dice: Dice) -> Any:
        """The output of a new model that runs there, whose generators begin as ``dice`` says. Raises ModelFailed with
        the model's own error, and `Gone`.
        """
        return self._ask("whole", (args, kwargs, dice))

    def tail(self, data: bytes) -> Any:
        """The output of a tail there, of `EarlyOutput.to_bytes`. Raises ModelFailed, `Gone`, and IsthmusError for a
        refusal.
        """
        return self._ask("tail", data)

    def _ask(self, what: str, given: Any) -> Any:
        try:
            self._pipe.send((what, given))
            said, value = self._pipe.recv()
        except Exception as error:
            raise Gone(f"the process that runs the model alone: {type(error).__name__}: {error}") from error
        if said != "gave":
            raise {"refused": IsthmusError, "failed": ModelFailed}.get(said, Gone)(value)
        return value


def _answer(pipe: Connection, make: Make, wrap: Callable[[nn.Module], Any], threads: int) -> None:
    """The process: answers until nothing is asked any more. It ends with its parent, whatever the model does then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both, and the parent ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    wrapped = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            what, given = pipe.recv()
            try:
                if what == "whole":
                    args, kwargs, dice = given
                    model = make()
                    dice.restore()
                    output = run_plain(model, args, kwargs)
                else:
                    wrapped = wrapped or wrap(make())
                    early = EarlyOutput.from_bytes(given, max_bytes=1 << 40)
                    torch.manual_seed(1)  # another process's generators stand anywhere
                    output = wrapped.tail(early)
                said: tuple[str, Any] = "gave", output
            except IsthmusError as error:
                said = "refused", str(error)
            except MemoryError as error:
                said = "gone", f"no memory: {error}"
            except Exception as error:
                said = "failed", f"{type(error).__name__}: {error}"
            try:
                pipe.send(said)
            except (EOFError, OSError):
                raise
            except Exception as error:  # an output that goes to no other process
                pipe.send(("gone", f"{type(error).__name__}: {error}"))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
