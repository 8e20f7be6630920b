"""A model in a process of its own, for `verify`: what one process shares between models (globals, attributes of
classes, settings, generators) hides nothing there.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from shared_hooks.crossing import EarlyOutput
from shared_hooks.errors import IsthmusError, ModelFailed
from shared_hooks.forward import run_plain

Make = Callable[[], nn.Module]
SECONDS = 5.0
"""For a process to end by itself."""


class Apart:
    """One process. ``make`` is called there, and ``wrap`` for what runs tails of the model. As always with Python's
    ``multiprocessing``, both must be importable there, and a script guards what it runs by
    ``if __name__ == "__main__"``. Use as a context manager. Raises ModelFailed where they are not.
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
            raise ModelFailed(f"the model cannot be made in another process: {error!s:.200}") from error
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

    def whole(self, args: tuple[Any, ...], kwargs: dict[str, Any], random_state: torch.Tensor) -> Any:
        """The output of a new model that runs there. Raises ModelFailed with the model's own error."""
        return self._ask("whole", (args, kwargs, random_state))

    def tail(self, data: bytes) -> Any:
        """The output of a tail there, of `EarlyOutput.to_bytes`. Raises ModelFailed, and IsthmusError for a refusal."""
        return self._ask("tail", data)

    def _ask(self, what: str, given: Any) -> Any:
        try:
            self._pipe.send((what, given))
            said, value = self._pipe.recv()
        except Exception as error:  # it has ended, or something is nothing that goes from one process to another
            raise ModelFailed(f"the process that runs the model alone: {type(error).__name__}: {error}") from error
        if said != "gave":
            raise (IsthmusError if said == "refused" else ModelFailed)(value)
        return value


def _answer(pipe: Connection, make: Make, wrap: Callable[[nn.Module], Any], threads: int) -> None:
    """The process: answers until nothing is asked any more."""
    torch.set_num_threads(threads)
    wrapped = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            what, given = pipe.recv()
            try:
                if what == "whole":
                    args, kwargs, random_state = given
                    model = make()
                    torch.set_rng_state(random_state)
                    pipe.send(("gave", run_plain(model, args, kwargs)))
                else:
                    wrapped = wrapped or wrap(make())
                    early = EarlyOutput.from_bytes(given, max_bytes=1 << 40)
                    torch.manual_seed(1)  # another process's generators stand anywhere
                    pipe.send(("gave", wrapped.tail(early)))
            except IsthmusError as error:
                pipe.send(("refused", str(error)))
            except Exception as error:
                pipe.send(("failed", f"{type(error).__name__}: {error}"))
