"""A frontier holds no byte that the tail does not read: change one element that is sent, and the answer changes.

Not every model can show it: a layer may read a value and not use it (a strided convolution, a mask, a maximum). Those
that cannot are named, with the reason.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from shared_hooks import EarlyOutput, WrappedModel
from tests.covering import ALL
from tests.shared_hooks.cutting import cuts_of, planned, tail
from tests.zoo import CASES, Case
from tests.zoo.compare import same

SAMPLES = 4

BLIND = {
    **dict.fromkeys(
        ["residual", "alex_net_like", "resnet18_like", "resnet50_bottleneck_like", "inception_like", "dilated_audio"],
        "strided or dilated windows leave elements out",
    ),
    **dict.fromkeys(
        [
            "where",
            "keyword_only_inputs",
            "masked_fill_in_place",
            "detection_head",
            "grid_sample",
            "mapped_mask",
            "constants_compared",
        ],
        "a mask, a maximum or a grid chooses elements",
    ),
    **dict.fromkeys(["constant_output", "dead_values", "complex_numbers"], "computed, and then thrown away"),
    **dict.fromkeys(
        ["base_and_view_cross_then_write", "two_views_no_base", "preallocated_uninitialised"],
        "an operation works on more elements than are used afterwards",
    ),
    **dict.fromkeys(
        ["real_part_zeroed", "imaginary_part_assigned", "row_of_complex_numbers_assigned", "one_byte_written"],
        "what is overwritten through elements of another size crosses with the rest",
    ),
    "writes_into_overlapping_input": "an operation works on more elements than are used afterwards",
    **dict.fromkeys(["packed_sequence_lstm", "ragged_list"], "padding is copied, and then not used"),
    "vit_like": "all tokens are normalised, the class token is used",
    "non_finite_input": "it is NaN already",
    "quantised_dynamically": "NaN cannot be quantised",
}
CHOSEN = [
    case for case in CASES if not (case.branches or case.loud) and "hub" not in case.tags and case.max_refused < 1
]


def with_nan(piece: Tensor, position: int) -> Tensor:
    """A copy in which one element, counted in row-major order, is not a number."""
    changed = piece.clone()
    index = torch.unravel_index(torch.tensor(position), piece.shape) if piece.ndim else ()
    changed[tuple(index)] = float("nan")
    return changed


def unneeded(case: Case, cloud: WrappedModel, cut: int | str, early: EarlyOutput) -> list[str]:
    """Elements of one frontier whose change does not change the output."""
    expected = tail(cloud, case, cut, early)
    found = []
    for number, piece in enumerate(early.pieces):
        if not (piece.is_floating_point() or piece.is_complex()) or piece.dtype.itemsize < 2:
            continue
        generator = torch.Generator().manual_seed(number)
        positions = {0, piece.numel() - 1, *torch.randint(piece.numel(), (SAMPLES - 2,), generator=generator).tolist()}
        for position in sorted(positions):
            pieces = list(early.pieces)
            pieces[number] = with_nan(piece, position)
            changed = dataclasses.replace(early, pieces=tuple(pieces))
            if same(tail(cloud, case, cut, changed), expected):
                found.append(
                    f"cut {cut}: piece {number} of {len(pieces)}, shape {tuple(piece.shape)}, element {position}"
                )
    return found


@pytest.mark.parametrize("case", [case for case in CHOSEN if case.name not in BLIND], ids=lambda case: case.name)
def test_every_byte_sent_is_needed(case: Case) -> None:
    edge, cloud = planned(case), WrappedModel(case.build())
    args, kwargs = case.inputs()
    failures = []
    for cut in list(cuts_of(edge))[:: 1 if ALL else 1 + len(edge.layers) // 5]:
        with case.setting():
            early = edge.forward(*args, end=cut, **kwargs)
        failures += unneeded(case, cloud, cut, early)
    assert not failures, "\n".join(failures)
