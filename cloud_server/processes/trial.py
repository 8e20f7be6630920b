"""The program of a trial: every cut of one model, its tail run on a copy that never ran before.

It prints a line of JSON for each cut, and ends. What it may take of time and memory is bounded here.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from functools import partial

import torch

from cloud_server.options import composed, parser
from cloud_server.processes.worker import die_with
from shared_hooks import WrappedModel
from shared_hooks.errors import IsthmusError, ModelFailed
from shared_hooks.planning import INPUT


def main(words: Sequence[str], model_id: str, first: str, seconds: float, nbytes: int, server: int) -> int:
    """The exit status: 0 when every cut was tried. ``words``: the server's command line; ``first``: the cut that is
    waited for; ``seconds`` of processor time and ``nbytes`` of memory bound each process. It ends with the process
    ``server``.
    """
    die_with(server)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the model prints is none of the answer
    _bounded(seconds, nbytes)
    torch.set_num_threads(1)
    try:
        entries = [one for one in composed(parser().parse_args(words)).models if one.spec.model_id == model_id]
        example = entries[0].spec.example("cpu") if entries else None
        if example is None:
            return 1
        args, kwargs = example
        make = partial(entries[0].spec.load_model, "cpu")

        def report(done: int, total: int, name: str, verdict: str) -> None:
            print(json.dumps([name, verdict]), file=out, flush=True)

        with WrappedModel(make(), entries[0].depth, metrics=False) as wrapped:
            plan = wrapped.plan(*args, **kwargs)
            try:
                plan.resolve(first)
            except IsthmusError:
                first = INPUT
            check = partial(wrapped.verify, *args, on_cut=report, cold=make, first=first, **kwargs)
            try:
                check(processes=True)
            except ModelFailed:  # its answer is nothing that goes from one process to another
                check()
    except Exception as error:  # the model's own, too: the server goes by what was printed
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _bounded(seconds: float, nbytes: int) -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # not on every system
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
        resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
