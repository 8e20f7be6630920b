"""One process of the three (edge, cloud, reference), played in this one: a module of its own, and its own random numbers.

What a process has for itself, and what a model may change, is kept per party and exchanged when it is another's turn:
the generated module (with its globals) under its name in ``sys.modules``, Python's, NumPy's and torch's generators, and
torch's default dtype.
"""

from __future__ import annotations

import linecache
import random
import sys
import types
from typing import Any

import numpy
import torch
from torch import nn

NAME = "isthmus_fuzzed"
FILE = "<fuzzed model>"


class Party:
    """A model made of ``source`` with weights of a fixed seed. ``with party:`` is its turn."""

    def __init__(self, source: str, code: types.CodeType, *, training: bool, seed: int) -> None:
        self.module = types.ModuleType(NAME)
        self.dtype = torch.float32
        self.python = random.Random(seed).getstate()
        self.numpy = numpy.random.RandomState(seed % 2**32).get_state()
        self.torch = torch.Generator().manual_seed(seed).get_state()
        linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
        with self:
            exec(code, self.module.__dict__)
            before = torch.get_rng_state()
            torch.manual_seed(0)
            self.model: nn.Module = self.module.Model().train(training)
            torch.set_rng_state(before)
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)

    def __enter__(self) -> Party:
        self.outside: Any = (
            sys.modules.get(NAME),
            random.getstate(),
            numpy.random.get_state(),
            torch.get_rng_state(),
            torch.get_default_dtype(),
        )
        sys.modules[NAME] = self.module
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        torch.set_default_dtype(self.dtype)
        return self

    def __exit__(self, *error: object) -> None:
        self.python, self.numpy = random.getstate(), numpy.random.get_state()
        self.torch, self.dtype = torch.get_rng_state(), torch.get_default_dtype()
        module, python, of_numpy, of_torch, dtype = self.outside
        if module is None:
            sys.modules.pop(NAME, None)
        else:
            sys.modules[NAME] = module
        random.setstate(python)
        numpy.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        torch.set_default_dtype(dtype)

    def reseed(self, seed: int) -> None:
        """As if the process's generators stood here: what edge and reference have in common before a request."""
        self.python = random.Random(seed).getstate()
        self.torch = torch.Generator().manual_seed(seed).get_state()
