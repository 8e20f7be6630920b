"""States that are kept between texts change no token, whatever the model's state is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from edge_client import EdgeClient, local_server
from edge_client.generation.drafting import Assistant, FirstLayers, Lookup
from edge_client.serving.chats import Chats, TextTask
from edge_client.serving.sampling import Sampling
from shared_hooks.errors import CutRefused, InputMismatch
from tests.shared_hooks.generation.small import MODELS, cut_of, make

END = 2
KEPT = [0, 33, 30, 20, 34, 0]
"""Tokens that the tokenizer gives; the models themselves have none."""


def own(client: EdgeClient, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    asked: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "do_sample": False}
    made: list[int] = client.wrapped.model.generate(ids, **asked)[0, len(prompt) :].tolist()  # type: ignore[operator]
    return made[: made.index(END)] if END in made else made


def spec_of(folder: Path, name: str) -> str:
    (folder / "model.toml").write_text(
        f'id = "{name}"\nfactory = "tests.shared_hooks.generation.small:make"\nfactory_kwargs = {{name = "{name}"}}\n'
        'tokenizer = "studies.serving:tokenizer"\n'
    )
    return str(folder / "model.toml")


@pytest.mark.parametrize("name", [name for name in MODELS if name != "t5"])
def test_turns_and_forks(name: str, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, name)
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
                written = chats.write(TextTask(tuple(prompt), 6, Sampling(temperature=0)), lambda chosen: False)
                assert list(written.ids) == own(client, prompt, 6), f"{len(kept)}: {written.kept} tokens were known"
                kept.append(written.kept)
            turn = [*prompt, *written.ids, *ids(3)]
            written = chats.write(TextTask(tuple(turn), 6, Sampling(temperature=0)), lambda chosen: False)
            assert list(written.ids) == own(client, turn, 6)
            if name in ("llama", "gpt2", "bloom", "experts"):
                assert kept == KEPT, kept
                assert written.kept >= len(turn) - 4
            with pytest.raises(InputMismatch, match="token id"):
                chats.write(TextTask((1, 100_000), 2, Sampling()), lambda chosen: False)
        finally:
            chats.close()


def test_drafts_change_no_token_and_make_fewer_steps(tmp_path: Path) -> None:
    spec, cut = spec_of(tmp_path, "llama"), cut_of("llama")
    prompt = [7, 8, 9, 10] * 6
    with local_server(spec) as server, EdgeClient(server, spec) as client:
        model = client.wrapped.model
        sources = {"lookup": Lookup(), "first layers": FirstLayers(cut), "assistant": Assistant(make("llama"))}
        trips = {}
        for name, source in sources.items():
            chats = Chats(client, cut, seats=2, drafts=source, most_drafted=4)
            try:
                turn = prompt
                for _ in range(2):  # the second continues the first's state
                    seen: list[int] = []
                    task = TextTask(tuple(turn), 12, Sampling(temperature=0))
                    written = chats.write(task, lambda chosen, seen=seen: seen.append(chosen.id))  # type: ignore[misc]
                    assert list(written.ids) == own(client, turn, 12) == seen, name
                    trips[name] = written.summary.round_trips
                    turn = [*turn, *written.ids, 7, 8]
                stopped = chats.write(TextTask(tuple(prompt), 12, Sampling(temperature=0)), lambda chosen: True)
                assert list(stopped.ids) == own(client, prompt, 12)[:1] and stopped.reason == "stop"
                drawn = TextTask(tuple(prompt), 6, Sampling(temperature=1.0, seed=3))
                assert chats.write(drawn, lambda chosen: False).summary.round_trips >= 6, "chance draws one by one"
            finally:
                chats.close()
        assert trips["assistant"] <= 6, trips
        with pytest.raises(CutRefused, match="last block"):
            Chats(client, cut, seats=1, drafts=FirstLayers(f"model.layers.{len(model.model.layers) - 1}"))
