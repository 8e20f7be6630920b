"""What is shown of objects is short, and what a notebook shows of them is sound."""

from __future__ import annotations

import dataclasses
import html.parser
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from shared_hooks.showing import MOST

OURS = ("shared_hooks", "edge_client", "cloud_server")


def within(found: Any, depth: int = 4) -> Iterator[Any]:
    """It, and the objects of our own classes that it holds, two of each class at most."""
    seen: dict[type, int] = {}
    left = [(found, depth)]
    done: set[int] = set()
    while left:
        one, deep = left.pop()
        ours = type(one).__module__.partition(".")[0] in OURS
        if id(one) in done or deep < 0 or seen.get(type(one), 0) >= (2 if ours else 1000):
            continue
        done.add(id(one))
        if ours:
            seen[type(one)] = seen.get(type(one), 0) + 1
            yield one
        inside: Iterable[Any] = ()
        if ours and dataclasses.is_dataclass(one):
            inside = [getattr(one, each.name, None) for each in dataclasses.fields(one)]
        elif isinstance(one, Mapping):
            inside = list(one.values())[:20]
        elif isinstance(one, (list, tuple)):
            inside = one[:20]
        left += [(each, deep - 1) for each in inside]


def check(*roots: Any) -> None:
    """Check each root, and what it holds of our classes."""
    for root in roots:
        for one in within(root):
            assert isinstance(one, Exception) or len(repr(one)) <= MOST, type(one)
            if hasattr(one, "_repr_html_"):
                text = one._repr_html_()
                assert len(text) < 100_000
                read(text)


class Balanced(html.parser.HTMLParser):
    """Every element is closed in its turn, and nothing is there that runs or loads."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "style", "link", "img", "iframe", "object")
        assert not any(name.startswith("on") or name in ("href", "src") for name, _ in attrs), attrs
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(text: str) -> str:
    """The text of HTML that is well formed and does nothing."""
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert not parser.open
    return parser.text
