"""What is streamed of a text: nothing of a stop text, nothing of a call, and nothing is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.serving.protocol import Pieces, TextRequest, calls_in
from edge_client.serving.sampling import Sampling


def asked(**more: Any) -> TextRequest:
    usual: dict[str, Any] = {
        "prompts": ((1,),),
        "sampling": Sampling(),
        "most": None,
        "stops": (),
        "choices": 1,
        "streams": True,
        "reports_usage": False,
        "is_chat": True,
    }
    return TextRequest(**{**usual, **more})


@given(
    st.lists(st.text("ab.", max_size=4), max_size=12),
    st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
)
def test_a_text_up_to_the_first_stop(parts: list[str], stops: list[str]) -> None:
    pieces = Pieces(asked(stops=tuple(stops)))
    given_on = "".join(pieces.add(part) for part in parts) + pieces.end()
    whole = "".join(parts)
    assert given_on == pieces.text
    assert whole.startswith(given_on) and not any(stop in given_on for stop in stops)
    if not any(stop in whole for stop in stops):
        assert given_on == whole


CALL = {"name": "look", "arguments": {"up": True}}
WRITTEN = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "shown", "count"),
    [
        ("just a text", "just a text", 0),
        (WRITTEN, "", 1),
        (f"Let me see. {WRITTEN}", "Let me see. ", 1),
        (f"{WRITTEN}{WRITTEN}", "", 2),
        (json.dumps(CALL), "", 1),
        ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', 0),
        ("<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", 0),
        ("a < b <tool", "a < b <tool", 0),
    ],
)
def test_calls_are_held_back_and_found(text: str, shown: str, count: int, step: int) -> None:
    request = asked(tools=("look",))
    pieces = Pieces(request)
    given_on = "".join(pieces.add(text[at : at + step]) for at in range(0, len(text), step)) + pieces.end()
    _, calls = calls_in(pieces.text, request)
    assert len(calls) == count
    assert given_on + ("" if calls else pieces.withheld) == shown
    assert all(json.loads(one["function"]["arguments"]) == CALL["arguments"] for one in calls)


def test_one_call_where_several_are_not_wanted() -> None:
    assert len(calls_in(WRITTEN + WRITTEN, asked(tools=("look",), several_calls=False))[1]) == 1
    assert calls_in(WRITTEN, asked())[1] == [], "no tools were given"
