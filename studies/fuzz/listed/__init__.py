"""Models that were answered wrongly and silently once, or failed outside of the error tree: one class per item.

Each file is run three times over, as three modules, so that edge, cloud and reference share no globals. A class says
with ``way`` how it is called (`calls.inputs`) and with ``left_training`` whether it is left in training mode. Numbers
called ``later`` are changed between requests, on all three alike.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from torch import nn

from studies.fuzz.judge import Subject
from studies.fuzz.listed import after_the_cut, control, half_done, handed_on, memory, outside, python_state, shapes

FILES = (python_state, handed_on, half_done, memory, shapes, outside, control, after_the_cut)
BASES = ("State", "Writer")


def subjects() -> list[Subject]:
    """Every model of the list."""
    found = []
    for file in FILES:
        text, path = inspect.getsource(file), str(Path(inspect.getfile(file)))
        for name, kind in vars(file).items():
            own = isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__ == file.__name__
            if own and not name.startswith("_") and name not in BASES:
                way, training = getattr(kind, "way", "one"), getattr(kind, "left_training", False)
                found.append(Subject(text, name=name, inputs=way, training=training, file=path))
    return found
