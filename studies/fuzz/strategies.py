"""What hypothesis draws: programs. Simple choices come first, because shrinking goes there."""

from __future__ import annotations

from hypothesis import strategies as st

from studies.fuzz.kinds import DATA, LAYERS, MATHS, PYTHON, VIEWS, WRITES
from studies.fuzz.program import FORMS, INPUTS, OUTPUTS, Program, Step
from studies.fuzz.scopes import SCOPES
from studies.fuzz.stores import STORES

# Half of all statements are layers or memory: without layers there is nowhere to cut, without memory little to lose.
_FAMILIES = (
    [list(LAYERS)] * 6
    + [["linear"]] * 3
    + [["put", "get"]] * 5
    + [["block"]] * 2
    + [list(MATHS), list(VIEWS), list(VIEWS), list(WRITES), list(WRITES), list(DATA), list(PYTHON), list(PYTHON)]
)
_INNER = 3
_FLAT = [(kind, False) for kind in LAYERS]
_NUMBERS = st.integers(0, 255)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A program of up to some fifteen statements."""

    def number() -> int:
        return draw(_NUMBERS)

    def steps(most: int, deep: int) -> tuple[Step, ...]:
        return tuple(step(deep) for _ in range(1 + draw(st.integers(0, most - 1))))

    def step(deep: int) -> Step:
        chosen = number()
        body: tuple[Step, ...] = ()
        if deep and chosen >= 225:
            kind = _SCOPES[number() % len(_SCOPES)]
            body = steps(_INNER, deep - 1)
        else:
            family = _FAMILIES[chosen % len(_FAMILIES)]
            kind = family[number() % len(family)] if len(family) > 1 else family[0]
        packed = number()
        b = number() % 16 if kind == "put" else (packed >> 2) & 3
        return Step(kind, packed & 3, b, packed >> 5, body)

    root = steps(7, 2)
    shape = number()
    blocks = tuple(steps(3, 1) for _ in range(_BLOCKS[shape & 3])) if "block" in _kinds(root) else ()
    stores = tuple(_STORES[number() % len(_STORES)] for _ in range(1 + (shape >> 2 & 1)))
    inputs = INPUTS[number() % len(INPUTS)] if shape & 8 else "one"
    output = OUTPUTS[number() % len(OUTPUTS)] if shape & 16 else "last"
    more = number() if blocks else 0
    forms = (FORMS[more % len(FORMS)], FORMS[more // 4 % len(FORMS)])
    depth = 1 if more >> 5 == 7 else None
    return Program(root, blocks, stores, inputs, output, shape >> 5 == 7, shape >> 5 in (1, 2), forms, depth)


_SCOPES = list(SCOPES)
_STORES = list(STORES)
_BLOCKS = (1, 1, 2, 2)


def _kinds(steps: tuple[Step, ...]) -> set[str]:
    return {step.kind for step in steps} | {kind for step in steps for kind in _kinds(step.body)}
