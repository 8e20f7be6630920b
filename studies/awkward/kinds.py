"""What awkward models do: a few lines of a forward each (``kinds.txt``), and the places where these lines may stand."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Final, NamedTuple


class Kind(NamedTuple):
    """Lines of code, for three places. Those of ``forward`` make ``x``, (2, 8), from ``x`` and ``self.l``, a layer."""

    before: str = ""
    init: str = ""
    forward: str = ""


def _read(text: str) -> dict[str, Kind]:
    found: dict[str, Kind] = {}
    for part in re.split(r"^== ", text, flags=re.MULTILINE)[1:]:
        name, _, rest = part.partition("\n")
        pieces = dict(piece.split("\n", 1) for piece in re.split(r"^-- ", rest, flags=re.MULTILINE)[1:])
        found[name] = Kind(*(pieces.get(where, "") for where in ("before the class", "in __init__", "in forward")))
    return found


KINDS: Final = _read(Path(__file__).with_name("kinds.txt").read_text())
PLACES: Final[dict[str, str]] = {
    "root": """class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.l, self.b = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
{setup}
    def forward(self, x):
        first = x = self.a(x).tanh()
{lines}
        return self.b(x) + first
""",
    "three blocks": """class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 8)
{setup}
    def forward(self, x):
        first = x
{lines}
        return x * 0.5 + first
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.o = nn.Linear(8, 8)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.o(x)
""",
    "one block, twice": """class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 8)
{setup}
    def forward(self, *, x, scale=1.0):
        first = x
{lines}
        return {{"x": x * scale, "first": first}}
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.i, self.block, self.o = nn.Linear(8, 8), Block(), nn.Linear(8, 8)
    def forward(self, x):
        x = self.i(x)
        found = self.block(x=x, scale=0.5)
        again = self.block(x=found["x"].tanh())
        return self.o(again["x"]) + found["first"], again
""",
}


def source(kind: str, place: str) -> str:
    """The text of a module with a class ``Model``."""
    lines = KINDS[kind]
    init, forward = (textwrap.indent(text, " " * 8) for text in (lines.init, lines.forward))
    return f"import torch\nfrom torch import nn\n{lines.before}{PLACES[place].format(setup=init, lines=forward)}"
