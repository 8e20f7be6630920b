"""A tail with gradients: those that autograd finds of the whole model, at every cut, also across skip connections."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shared_hooks import WrappedModel
from shared_hooks.models import load_spec
from tests.edge_client.small_models import Residual


@pytest.mark.parametrize("name", ["digits", "residual"])
def test_gradients_are_those_of_the_pieces(name: str) -> None:
    torch.manual_seed(0)
    model = (load_spec("digits").load_model("cpu") if name == "digits" else Residual().eval()).double()
    inputs = torch.randn(2, 1, 32, 32).double() if name == "digits" else torch.randn(2, 3, 16, 16).double()
    with WrappedModel(model) as wrapped:
        for cut in [one.name for one in wrapped.plan(inputs).cuts][::5]:
            early = wrapped.head(cut, inputs)
            pieces = [one.clone().requires_grad_() for one in early.pieces]
            output = wrapped.tail(replace(early, pieces=tuple(one * 1.0 for one in pieces)), gradients=True)
            direction = torch.randn_like(output)
            (output * direction).sum().backward()
            step = 1e-6
            for number, piece in enumerate(pieces):
                assert piece.grad is not None
                move = torch.randn_like(piece)
                outputs = [
                    wrapped.tail(
                        replace(
                            early,
                            pieces=tuple(
                                one.detach() + (sign * step * move if at == number else 0)
                                for at, one in enumerate(pieces)
                            ),
                        )
                    )
                    for sign in (1, -1)
                ]
                found = float(((outputs[0] - outputs[1]) * direction).sum()) / (2 * step)
                assert abs(found - float((piece.grad * move).sum())) < 1e-3 * abs(found) + 1e-5
            plain = wrapped.tail(early)
            assert not plain.requires_grad and torch.equal(plain, wrapped.whole(inputs))
