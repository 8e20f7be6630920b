"""A chat reads only what is new, and says what it would say if it read everything."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from edge_client import EdgeClient
from edge_client.generation import Conversation, SplitGenerator, Words
from tests.edge_client.generation.speaking import CUT

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content | lower }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}


def test_turns_without_a_template(client: EdgeClient) -> None:
    words = Words.of(client.spec)
    with SplitGenerator(client, CUT) as generator:
        chat = Conversation(generator, words, **OPTIONS)
        pieces: list[str] = []
        first = chat.say("hello", pieces.append)
        assert "".join(pieces) == first.text
        assert first.kept == 0
        second = chat.say("and you?")
    assert second.kept > 0
    assert second.read < second.kept
    said = words.encode("hello\n")
    model = client.wrapped.model
    said = model.generate(torch.tensor([said]), pad_token_id=words.pad, **OPTIONS)[0].tolist()
    said += words.encode("\nand you?\n", first=False)
    ids = model.generate(torch.tensor([said]), pad_token_id=words.pad, **OPTIONS)[0].tolist()
    assert words.decode(ids[len(said) :]) == second.text


def test_a_template_writes_the_turns(client: EdgeClient) -> None:
    """This one writes answers otherwise than they came: what the model has read beyond that is taken back."""
    words = Words.of(client.spec)
    words.tokenizer.chat_template = TEMPLATE
    assert words.has_template
    with SplitGenerator(client, CUT) as generator:
        chat = Conversation(generator, words, system="be brief", **OPTIONS)
        first = chat.say("hello")
        second = chat.say("and you?")
    ids = words.chat(
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "and you?"},
        ]
    )
    found = client.wrapped.model.generate(torch.tensor([ids]), pad_token_id=words.pad, **OPTIONS)[0, len(ids) :]
    assert words.decode(found.tolist()) == second.text
    begins = words.chat([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}])
    assert first.text != first.text.lower()
    assert len(begins) - 2 <= second.kept < len(begins) + len(words.encode(first.text))
    assert second.read + second.kept == len(ids)


def test_a_reset_forgets(client: EdgeClient) -> None:
    with SplitGenerator(client, CUT) as generator:
        chat = Conversation(generator, Words.of(client.spec), **OPTIONS)
        first = chat.say("hello")
        chat.say("more")
        chat.reset()
        again = chat.say("hello")
        assert again.text == first.text
        assert (again.kept, len(chat.turns)) == (0, 1)


def test_a_turn_that_failed_was_not(client: EdgeClient) -> None:
    with SplitGenerator(client, CUT) as generator:
        words = Words.of(client.spec)
        chat = Conversation(generator, words, **OPTIONS)
        chat.say("hello")

        def fail(text: str) -> None:
            raise RuntimeError("the screen is gone")

        with pytest.raises(RuntimeError, match="screen"):
            chat.say("lost", fail)
        assert len(chat.turns) == 1
        after = chat.say("and you?")
        other = Conversation(generator, words, **OPTIONS)
        other.say("hello")
        assert other.say("and you?").text == after.text
