"""Every cut of random networks: skips, views, writes in place, concatenation, reuse, nested modules that write into
their arguments and hand back aliases.

A program is a list of instructions over registers that hold (3, 8) tensors; :class:`Machine` runs it.
"""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shared_hooks import WrappedModel
from shared_hooks.errors import IsthmusError
from tests.covering import examples
from tests.shared_hooks.cutting import through_bytes
from tests.zoo.case import Draw, seeded
from tests.zoo.compare import differences

LAYERS = 5
Instruction = tuple[str, int, int]
Program = list[Instruction]
_KINDS = """linear linear linear add sub mul cat half_turn view strided alias add_ relu_ copy_ fill_slice scale_view_
    swap where sum_keep inplace_layer expand drop_old clone transpose_write residual_block shape_const late_input
    buffer buffer_part out_argument detach unbind_write item"""
KINDS = _KINDS.split()
NESTED = ["inner", "inner", "inner_pair", "inner_list"]

steps = st.tuples(st.sampled_from(KINDS), st.integers(0, 7), st.integers(0, 7))
outer_steps = st.tuples(st.sampled_from(KINDS + NESTED), st.integers(0, 7), st.integers(0, 7))
programs = st.tuples(
    st.lists(outer_steps, min_size=3, max_size=14),
    st.lists(steps, min_size=1, max_size=5),
    st.lists(steps, min_size=1, max_size=5),
)


class Body(nn.Module):
    """Layers, and what each instruction does with them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(LAYERS - 1)] + [nn.LayerNorm(8)])
        self.join = nn.Linear(16, 8)
        self.relu = nn.ReLU(inplace=True)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))

    def run(self, program: Program, registers: list[Tensor], late: Tensor) -> None:
        for kind, i, j in program:
            a, b = registers[-1 - i % len(registers)], registers[-1 - j % len(registers)]
            result = self.step(kind, a, b, j, late, registers)
            if result is not None:
                registers.append(result)

    def step(self, kind: str, a: Tensor, b: Tensor, j: int, late: Tensor, registers: list[Tensor]) -> Tensor | None:
        match kind:
            case "linear":
                return torch.tanh(self.layers[j % LAYERS](a))
            case "add":
                return a + b
            case "sub":
                return a - 0.5 * b
            case "mul":
                return a * torch.sigmoid(b)
            case "cat":
                return self.join(torch.cat([a, b], -1))
            case "half_turn":
                left, right = a.chunk(2, -1)
                return torch.cat([right, -left], -1)
            case "view":
                return a.reshape(3, 2, 4).transpose(1, 2).reshape(3, 8)
            case "strided":
                return torch.cat([a[:, ::2], b[:, 1::2]], -1)
            case "alias":
                return a.view(24).view(3, 8) if a.is_contiguous() else a[:]
            case "add_":
                a.add_(b)  # b may be a, or a view of it
            case "relu_":
                self.relu(a)
            case "copy_":
                a.copy_(b.clone())
            case "fill_slice":
                a[:, j : j + 1] = b.mean(-1, keepdim=True)
            case "scale_view_":
                a[j % 3].mul_(0.5)
            case "swap":
                registers.reverse()
            case "where":
                return torch.where(a > 0, a, b)
            case "sum_keep":
                return a.sum(-1, keepdim=True).expand(3, 8) * 0.1
            case "inplace_layer":
                return self.relu(self.layers[j % LAYERS](a))
            case "expand":
                return a[:1].expand(3, 8).clone()
            case "drop_old":
                if len(registers) > 2:
                    registers.pop(0)
            case "clone":
                return a.clone()
            case "transpose_write":
                square = a[:, :3].t()
                square.sub_(0.1 * b[:, 3:6])
            case "residual_block":
                return a + self.block(b)
            case "shape_const":
                return a + torch.arange(a.shape[-1], dtype=a.dtype) * 0.01
            case "late_input":
                return a * late
            case "buffer":  # a constant that comes to depend on the inputs, part by part
                made = torch.zeros(3, 8)
                made[j % 3] = a[0]
                return made
            case "buffer_part":
                made = torch.empty_like(a).fill_(0.3)
                made[:, : j + 1].copy_(b[:, : j + 1])
                return made
            case "out_argument":
                made = torch.empty(3, 8)
                torch.add(a, b, out=made)
                return made
            case "detach":
                return a.detach()
            case "unbind_write":
                a.unbind(0)[j % 3].mul_(0.7)
            case "item":
                return b * max(-2.0, min(2.0, a.mean().item()))
        return None


class Inner(Body):
    """A nested module: writes into what it is given, hands back what it was given."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def forward(self, given: Tensor | list[Tensor], late: Tensor, pair: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        registers = list(given) if isinstance(given, list) else [given]
        self.run(self.program, registers, late)
        return (registers[-1], registers[0]) if pair else registers[-1]


class Machine(Body):
    """Register 0 is the first input; results are appended; the answer is the last three registers."""

    def __init__(self, programs: tuple[Program, Program, Program]) -> None:
        super().__init__()
        self.program = programs[0]
        self.inners = nn.ModuleList([Inner(programs[1]), Inner(programs[2])])

    def forward(self, x: Tensor, late: Tensor) -> tuple[Tensor, ...]:
        registers = [x * 1.0]
        self.run(self.program, registers, late)
        return tuple(registers[-3:])

    def step(self, kind: str, a: Tensor, b: Tensor, j: int, late: Tensor, registers: list[Tensor]) -> Tensor | None:
        inner = self.inners[j % 2]
        match kind:
            case "inner":
                return inner(a, b)
            case "inner_pair":
                first, second = inner(a, late, pair=True)
                return first + second
            case "inner_list":
                return inner([a, b], late=late)
        return super().step(kind, a, b, j, late, registers)


# buffers that the model drops before the cut: their addresses are used again
DROPPED: Program = [
    ("buffer", 4, 7),
    ("out_argument", 0, 5),
    ("scale_view_", 5, 3),
    ("drop_old", 1, 3),
    ("clone", 0, 6),
]
DROPPED += [("linear", 5, 2), ("linear", 7, 6), ("drop_old", 7, 6), ("shape_const", 1, 0), ("inner_pair", 2, 2)]
DROPPED += [("inplace_layer", 1, 2)]


@settings(max_examples=examples(50), suppress_health_check=list(HealthCheck), derandomize=True)
@example((DROPPED, [("mul", 7, 6), ("cat", 4, 6)], [("mul", 5, 2), ("strided", 5, 1), ("swap", 6, 6), ("add_", 6, 4)]))
@given(programs)
def test_every_cut_of_a_random_network_is_exact(programs: tuple[Program, Program, Program]) -> None:
    """And none is refused. Planned on one input, run on it and on another."""
    build = seeded(lambda: Machine(programs))
    draw = Draw(0)
    calls = [(draw.randn(3, 8), draw.randn(3, 8)) for _ in range(2)]
    try:
        with torch.no_grad():
            expected = [build()(x.clone(), late.clone()) for x, late in calls]
    except RuntimeError:  # some programs write into overlapping memory, which torch refuses
        return
    edge, cloud = WrappedModel(build()), WrappedModel(build())
    edge.plan(*(tensor.clone() for tensor in calls[0]))
    reads = any(kind == "item" for program in programs for kind, _, _ in program)
    assert not [(layer.name, layer.reason) for layer in edge.layers if not layer.can_split]
    for cut in ["input", *range(len(edge.layers))]:
        for number, (x, late) in enumerate(calls):
            try:
                got = cloud.forward(through_bytes(edge.forward(x.clone(), late.clone(), end=cut)), start=cut)
            except IsthmusError:
                assert reads and number, f"cut {cut}"
                continue
            assert not list(differences(got, expected[number])), f"cut {cut} of {[x.name for x in edge.layers]}"
