"""The page: complete in itself, and nothing that a user wrote becomes a part of it."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.pages import duration, inert
from edge_client.sweeping.report import render
from edge_client.sweeping.wording import lead
from shared_hooks.metrics.records import Reading
from tests.edge_client.sweeping import synthetic

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\"'><svg onload=alert(1)>",
    "<!--<script>",
    "]]>{{ 7*7 }}{% raw %}",
    "\u2028\u2029\u202e\x1b[2J",
    "${alert(1)}`",
]


class Elements(HTMLParser):
    """Every element and attribute of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def shape(page: str) -> list[str]:
    return [tag for tag, _ in Elements(page).found]


def data(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found.group(1))


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_names_are_text(hostile: str) -> None:
    def page(text: str) -> str:
        names = {"name": "layer{}." + text.replace("{", "{{").replace("}", "}}")}
        return render(
            synthetic.known(
                2,
                model=text,
                inputs=[f"{text}.png", "b.png"],
                energy=Reading.estimated(0.1, text),
                error=f"ModelFailed: {text}",
                failing="cloud-only",
                ended=text,
                **names,
            )
        )

    plain, attacked = page("harmless"), page(hostile)
    assert shape(attacked) == shape(plain)
    scripts = [attributes for tag, attributes in Elements(attacked).found if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "data"}, {}]
    assert "49" not in re.findall(r"<h1>(.*?)</h1>", attacked)[0]


@given(st.recursive(st.text() | st.floats(allow_nan=False, allow_infinity=False), lambda inner: st.lists(inner)))
def test_data_ends_no_element_and_comes_out_as_it_went_in(value: Any) -> None:
    text = inert({"value": value})
    assert not set(text) & set("<>&\u2028\u2029") and text.isascii()
    assert json.loads(text) == {"value": value}


@pytest.mark.parametrize("known", [{}, {"predicted": False}, {"count": 0}, {"inputs": ["x.npy"], "repetitions": 1}])
def test_a_page_asks_nobody_for_anything(known: dict[str, Any]) -> None:
    page = render(synthetic.known(**known))
    for tag, attributes in Elements(page).found:
        assert tag not in ("iframe", "object", "embed", "base", "form")
        for name in ("src", "href", "action", "srcset"):
            asked = attributes.get(name)
            assert asked is None or asked == "data:," or asked.startswith("#"), (tag, attributes)
    assert "url(" not in page and "@import" not in page and "import(" not in page
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert "default-src 'none'" in page


def test_it_stays_small() -> None:
    assert len(render(synthetic.known(60))) < 400_000


def test_failures_and_gaps_are_reported() -> None:
    page = render(synthetic.known(3, failing="cloud-only", error="Boom: it broke", ended="ServerUnavailable: gone"))
    assert "10 times, first with a.png at cloud-only (networked): Boom: it broke" in page
    assert "Not complete: 2 of 2 inputs (ServerUnavailable: gone)" in page
    assert "no energy meter here" in page


def test_when_nothing_was_answered_there_is_a_page_still() -> None:
    known = synthetic.known(1)
    for way in known["ways"]:
        way.update(latency_ns=None, quartiles_ns=None, segments_ns=None, bytes_up=None, bytes_down=None, predicted=None)
        way["failed"] = way["requests"]
        way["exact"] = 0
    known["decision"].update(measured=None, predicted=None, why_not="there is no candidate to choose from")
    known["layers"] = []
    page = render(known)
    assert "there is no candidate to choose from" in page and data(page)["winner"] is None


def test_drawn_is_what_was_measured() -> None:
    known = synthetic.known(4)
    drawn = data(render(known))
    assert drawn["ways"] == known["ways"] and drawn["layers"] == known["layers"]
    assert drawn["winner"] == known["decision"]["measured"]["winner"]
    assert drawn["winner"] in drawn["fronts"]["bytes"] and drawn["fronts"]["energy"] == []


@pytest.mark.parametrize(
    ("known", "sentence"),
    [
        ({}, "2 inputs in 10 rounds: 15 ways × (8 for the latency + 2 for the layers) = 150 requests."),
        (
            {"failing": "cloud-only"},
            "2 inputs in 10 rounds: 15 ways × (8 for the latency + 2 for the layers) = 150 req",
        ),
        (
            {"inputs": ["x"], "repetitions": 1},
            "1 input in 2 rounds: 15 ways × (1 for the latency + 1 for the layers) = 30",
        ),
    ],
)
def test_the_first_sentence_adds_up(known: dict[str, Any], sentence: str) -> None:
    made = synthetic.known(**known)
    said = lead(made)
    assert said.startswith(sentence)
    inputs, rounds, ways, timed, layers, total = map(int, re.findall(r"\d+", said.split(".")[0]))
    assert inputs == len(made["measured_inputs"]) and rounds == timed + layers
    assert ways == len(made["ways"]) and ways * rounds == total == sum(way["requests"] for way in made["ways"])
    kinds = re.search(r"The ways: (.*?)\. The cloud", said)
    assert kinds and sum(int((re.findall(r"^\d+", one) or ["1"])[0]) for one in kinds.group(1).split(", ")) == ways


def test_requests_not_made_are_in_the_summary() -> None:
    made = synthetic.known(2)
    made["ways"][2]["requests"] -= 3
    assert "7 ways × (8 for the latency + 2 for the layers) = 70 requests, of which 3 were not made: 67 req" in lead(
        made
    )


def test_columns_that_have_nothing_to_say_are_left_out() -> None:
    plain, full = (
        render(synthetic.known(2, predicted=False)),
        render(synthetic.known(2, energy=Reading.estimated(0.1, "a share"), failing="cloud-only")),
    )
    for header in ("off by", "energy, edge", "failed"):
        assert f'<th scope="col">{header}</th>' not in plain and f'<th scope="col">{header}</th>' in full


@pytest.mark.parametrize(
    ("ns", "text"), [(None, "–"), (0, "0.00 µs"), (1234, "1.23 µs"), (2.5e6, "2.50 ms"), (3.21e9, "3.21 s")]
)
def test_durations_have_a_unit(ns: float | None, text: str) -> None:
    assert duration(ns) == text
