"""Why a model raised, in one line: beside its forward and the example. What it takes is never refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edge_client import Call, EdgeClient, ModelChoice
from shared_hooks.errors import InputMismatch, ModelFailed

IDS = torch.ones(1, 8, dtype=torch.int64)


class Words(nn.Module):
    """As transformers' models: keywords, all of them optional, and any other is swallowed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.out = nn.Linear(4, 2)

    def forward(
        self, input_ids: Any = None, inputs_embeds: Any = None, mask: Any = None, parts: Any = (), **more: Any
    ) -> Tensor:
        if input_ids is None and inputs_embeds is None:
            raise ValueError("You must specify\neither input_ids or inputs_embeds")
        if inputs_embeds is None:
            batch, _ = input_ids.size()
            inputs_embeds = self.embed(input_ids).view(batch, -1, 4)
        if mask is not None:
            inputs_embeds = inputs_embeds * mask.unsqueeze(-1)
        out: Tensor = self.out(inputs_embeds)
        return out + sum(part.unsqueeze(-1) for part in parts)


class Plain(nn.Module):
    """One positional tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 2, 3)

    def forward(self, image: Tensor) -> Tensor:
        out: Tensor = self.first(image)
        return out


@pytest.fixture(scope="module")
def words() -> Iterator[EdgeClient]:
    example = ((), {"input_ids": IDS, "mask": IDS, "parts": [IDS]})
    with EdgeClient(None, ModelChoice(Words().eval(), model_id="w", example=example), "edge-only") as client:
        yield client


@pytest.fixture(scope="module")
def plain() -> Iterator[EdgeClient]:
    """Nobody gave it an example."""
    with EdgeClient(None, ModelChoice(Plain().eval(), model_id="p"), "edge-only") as client:
        yield client


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"input_idz": IDS},
            "has no argument 'input_idz': it takes input_ids, inputs_embeds, mask, parts. Did ",
        ),
        ({"input_ids": IDS.float()}, "input_ids is float32 [1, 8], in the example int64 [1, 8] (the model: "),
        ({"input_ids": IDS[0]}, "input_ids is int64 [8], in the example int64 [1, 8] (the model: ValueError: "),
        (IDS[0], "input_ids is int64 [8], in the example int64 [1, 8]"),
        (
            {"input_ids": "a good day"},
            "input_ids is text, in the example int64 [1, 8]: give what the model's",
        ),
        ({"input_ids": [[1, 2]]}, "input_ids is of type list, in the example int64 [1, 8]: give a tensor"),
        ({"input_ids": IDS, "mask": True}, "mask is of type bool, in the example int64 [1, 8]: give a tensor"),
        ({"input_ids": IDS, "parts": ["a"]}, "parts[0] is text, in the example int64 [1, 8]"),
        ({"input_ids": IDS, "parts": 3}, "parts is of type int, in the example of type list"),
        ((IDS, {"a": IDS}, {"b": 1}), "mask is a dictionary of b, in the example int64 [1, 8]"),
    ],
)
@pytest.mark.filterwarnings("ignore:the model names no argument")
def test_beside_the_example(words: EdgeClient, given: Any, said: str) -> None:
    with pytest.raises(InputMismatch) as wrong:
        words.infer(given)
    assert said in str(wrong.value) and "\n" not in str(wrong.value) and wrong.value.__cause__ is not None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            Call((3.5,)),
            "image is of type float, and no input is a tensor: give a tensor (the model: TypeError: ",
        ),
        (Call(("words",)), "image is text, and no input is a tensor: give what the model's tokenizer makes of it"),
        (Call((), {"imagee": torch.ones(1)}), "no argument 'imagee': it takes image. Did you mean image?"),
        (Call(({"imagee": torch.ones(1)},)), "no argument 'imagee': it takes image. Did you mean image?"),
        (Call((), {"zzz": torch.ones(1)}), "no argument 'zzz': it takes image (the model: TypeError"),
        (Call((torch.ones(1), 2)), "cannot be called so, too many positional arguments: it takes image"),
        (Call(), "cannot be called so, missing a required argument: 'image': it takes image"),
    ],
)
def test_beside_forward_alone(plain: EdgeClient, given: Any, said: str) -> None:
    with pytest.raises(InputMismatch) as wrong:
        plain.infer(given)
    assert said in str(wrong.value) and "\n" not in str(wrong.value)


def test_accepted_inputs_are_never_refused(words: EdgeClient) -> None:
    """Other dtypes, other ranks, other names, nothing of the example."""
    for given in (
        {"input_ids": IDS.int()},
        {"input_ids": IDS, "mask": IDS.int()},
        {"inputs_embeds": torch.ones(8, 4)},
        {"inputs_embeds": torch.ones(2, 1, 3, 4), "strange": 1},
        {"input_ids": IDS, "parts": (IDS.half(), torch.ones(1))},
    ):
        assert words.infer(Call((), given)).output.isfinite().all()


def test_a_size_and_the_models_own_mind_stay_its_failure(words: EdgeClient, plain: EdgeClient) -> None:
    for client, given, said in (
        (words, {"input_ids": IDS * 99}, "w raised IndexError: index out of range in self"),
        (words, {"input_ids": IDS, "mask": IDS[:, :3]}, r"mask is int64 \[1, 3\], in the example int64 \[1, 8\]"),
        (words, {"mask": IDS}, "the example gives input_ids"),
        (plain, {"image": torch.ones(1, 3, 8, 8)}, "but got 3 channels"),
    ):
        with pytest.raises(ModelFailed, match=said):
            client.infer(given)


def test_a_keyword_that_is_swallowed_is_reported_once(words: EdgeClient, caplog: pytest.LogCaptureFixture) -> None:
    """It is near to one that forward names, or infer itself, and that was not given; the answer comes all the same."""
    for slip, meant in (("input_embeds", "inputs_embeds"), ("spilt", "split")):
        with pytest.warns(UserWarning, match=f"no argument '{slip}'.* Did you mean {meant}"):
            words.infer(input_ids=IDS, **{slip: IDS})
        assert f"Did you mean {meant}" in caplog.messages[-1]
        words.infer(input_ids=IDS, **{slip: IDS})
    words.infer(input_ids=IDS, mask=IDS, masks=IDS, output_attentions=True)  # given, or near to nothing
    assert len(caplog.messages) == 2


def test_refused_keyword_offers_the_names_of_infer(plain: EdgeClient) -> None:
    with pytest.raises(InputMismatch, match="no argument 'spilt': it takes image. Did you mean split"):
        plain.infer(torch.ones(1, 1, 8, 8), spilt="first")
