"""Every cut of random networks: skips, views, writes in place, concatenation, reuse.

A program is a list of instructions over registers that hold (3, 8) tensors; :class:`Machine` runs it.
"""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shared_hooks import WrappedModel
from shared_hooks.errors import CutRefused
from tests.engine.cutting import through_bytes
from tests.zoo.case import Draw, seeded
from tests.zoo.compare import differences

LAYERS = 5
Instruction = tuple[str, int, int]
_KINDS = """linear linear linear add sub mul cat half_turn view strided alias add_ relu_ copy_ fill_slice scale_view_
    swap where sum_keep inplace_layer expand drop_old clone transpose_write residual_block shape_const late_input"""
KINDS = _KINDS.split()

programs = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 7), st.integers(0, 7)), min_size=3, max_size=18)


class Machine(nn.Module):
    """Runs a program. Register 0 is the first input; results are appended; the answer is the last three registers."""

    def __init__(self, program: list[Instruction]) -> None:
        super().__init__()
        self.program = program
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(LAYERS - 1)] + [nn.LayerNorm(8)])
        self.join = nn.Linear(16, 8)
        self.relu = nn.ReLU(inplace=True)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8))

    def forward(self, x: Tensor, late: Tensor) -> tuple[Tensor, ...]:
        registers = [x * 1.0]
        for kind, i, j in self.program:
            a, b = registers[-1 - i % len(registers)], registers[-1 - j % len(registers)]
            result = self.step(kind, a, b, j, late, registers)
            if result is not None:
                registers.append(result)
        return tuple(registers[-3:])

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
        return None


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(programs)
def test_every_cut_of_a_random_network_is_exact(program: list[Instruction]) -> None:
    build = seeded(lambda: Machine(program))
    draw = Draw(0)
    x, late = draw.randn(3, 8), draw.randn(3, 8)
    with torch.no_grad():
        expected = build()(x.clone(), late.clone())
    edge, cloud = WrappedModel(build()), WrappedModel(build())
    edge.plan(x, late)
    for cut in ["input", *range(len(edge.layers))]:
        if cut != "input" and not edge.layers[cut].can_split:  # type: ignore[index]
            assert edge.layers[cut].reason  # type: ignore[index]
            continue
        early = through_bytes(edge.forward(x.clone(), late.clone(), end=cut))
        got = cloud.forward(early, start=cut)
        assert not list(differences(got, expected)), f"cut {cut} of {[layer.name for layer in edge.layers]}"


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(programs)
def test_random_networks_are_seldom_refused(program: list[Instruction]) -> None:
    wrapped = WrappedModel(seeded(lambda: Machine(program))())
    x, late = Draw(0).randn(3, 8), Draw(1).randn(3, 8)
    plan = wrapped.plan(x, late)
    refused = [layer for layer in plan.layers if not layer.can_split]
    assert not refused, refused
    for layer in plan.layers:
        try:
            plan.resolve(layer.name)
        except CutRefused as error:
            raise AssertionError from error
