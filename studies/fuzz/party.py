"""One process of the three (edge, cloud, reference), played in this one: its own module, its own random numbers.

What a process has for itself, and what a generated model may change, is kept per party and exchanged when it is
another's turn: the generated module (with its globals) under its name in ``sys.modules``, Python's and torch's
generators, and torch's default dtype.
"""

from __future__ import annotations

import linecache
import random
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

NAME = "isthmus_fuzzed"
FILE = "<fuzzed model>"


class Party:
    """A model made of ``source`` with weights of a fixed seed. ``with party:`` is its turn, one after the other."""

    def __init__(self, source: str, code: types.CodeType, *, name: str, training: bool, seed: int) -> None:
        self.module = types.ModuleType(NAME)
        self.dtype = torch.float32
        self.draws = "random" in source  # exchanging Python's and NumPy's generators costs as much as a small layer
        self.reseed(seed)
        if code.co_filename == FILE:
            linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
        with self:
            exec(code, self.module.__dict__)
            torch.default_generator.manual_seed(0)  # torch.manual_seed looks at devices, for two milliseconds
            self.model: nn.Module = getattr(self.module, name)().train(training)
            torch.set_rng_state(self.torch)
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)

    def reseed(self, seed: int) -> None:
        """As if the process's generators stood here: what edge and reference have in common before a request."""
        if self.draws:
            self.python = random.Random(seed).getstate()
            self.numpy = np.random.RandomState(seed).get_state()  # what models draw from
        self.torch = torch.Generator().manual_seed(seed).get_state()

    def __enter__(self) -> Party:
        sys.modules[NAME] = self.module
        if self.draws:
            random.setstate(self.python)
            np.random.set_state(self.numpy)  # noqa: NPY002
        torch.set_rng_state(self.torch)
        if self.dtype is not torch.float32:
            torch.set_default_dtype(self.dtype)
        return self

    def __exit__(self, *error: object) -> None:
        if self.draws:
            self.python, self.numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
        self.torch, self.dtype = torch.get_rng_state(), torch.get_default_dtype()
        if self.dtype is not torch.float32:
            torch.set_default_dtype(torch.float32)


@contextmanager
def world_kept() -> Iterator[None]:
    """What parties exchange is afterwards as it was."""
    python, of_torch, dtype = random.getstate(), torch.get_rng_state(), torch.get_default_dtype()
    numpy = np.random.get_state()  # noqa: NPY002
    relu = torch.nn.functional.relu
    try:
        yield
    finally:
        torch.nn.functional.relu = relu
        torch.set_flush_denormal(False)
        sys.modules.pop(NAME, None)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(of_torch)
        torch.set_default_dtype(dtype)
