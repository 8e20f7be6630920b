"""States that are kept between texts change no token, whatever the model's state is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from edge_client import EdgeClient, local_server
from edge_client.serving.chats import Chats, Task
from edge_client.serving.sampling import Sampling
from shared_hooks.errors import InputMismatch
from tests.shared_hooks.generation.small import MODELS, cut_of

END = 2
KEPT = [0, 33, 30, 20, 34, 0]
"""Of the tokenizer; the models themselves have none."""


def own(client: EdgeClient, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    asked: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "do_sample": False}
    made: list[int] = client.wrapped.model.generate(ids, **asked)[0, len(prompt) :].tolist()  # type: ignore[operator]
    return made[: made.index(END)] if END in made else made


@pytest.mark.parametrize("name", [name for name in MODELS if name != "t5"])
def test_turns_and_forks(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.toml").write_text(
        f'id = "{name}"\nfactory = "tests.shared_hooks.generation.small:make"\nfactory_kwargs = {{name = "{name}"}}\n'
        'tokenizer = "studies.serving:tokenizer"\n'
    )
    spec = str(tmp_path / "model.toml")
    dice = torch.Generator().manual_seed(4)

    def ids(count: int) -> list[int]:
        found: list[int] = torch.randint(5, 100, (count,), generator=dice).tolist()
        return found

    with local_server(spec) as server, EdgeClient(server, spec) as client:
        chats = Chats(client, cut_of(name), seats=1)
        try:
            system, kept = ids(30), []
            first = [*system, *ids(4)]
            for prompt in (first, first, [*system, *ids(6)], [*system[:20], *ids(3)], [*first, *ids(2)], ids(8)):
                written = chats.write(Task(tuple(prompt), 6, Sampling(temperature=0)), lambda chosen: False)
                assert list(written.ids) == own(client, prompt, 6), f"{len(kept)}: {written.kept} tokens were known"
                kept.append(written.kept)
            turn = [*prompt, *written.ids, *ids(3)]
            written = chats.write(Task(tuple(turn), 6, Sampling(temperature=0)), lambda chosen: False)
            assert list(written.ids) == own(client, turn, 6)
            if name in ("llama", "gpt2", "bloom", "experts"):
                assert kept == KEPT, kept
                assert written.kept >= len(turn) - 4
            with pytest.raises(InputMismatch, match="token id"):
                chats.write(Task((1, 100_000), 2, Sampling()), lambda chosen: False)
        finally:
            chats.close()
