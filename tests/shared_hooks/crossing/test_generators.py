"""Generators of random numbers: whether any has moved."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from shared_hooks.crossing import generators

CPU = torch.device("cpu")
DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(3),
    "python": random.random,
    "numpy": lambda: np.random.rand(),  # noqa: NPY002
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_shows_in_the_fingerprint_unless_that_generator_is_left_out(name: str) -> None:
    with generators.kept(generators.ALL):
        before, without = generators.fingerprint((), CPU), generators.fingerprint((name,), CPU)
        assert generators.fingerprint((), CPU) == before
        DRAWS[name]()
        after = generators.fingerprint((), CPU)
        assert [key for key, mark in before.items() if after[key] != mark] == [name]
        assert generators.fingerprint((name,), CPU) == without
