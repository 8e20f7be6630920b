"""The page of a plan of a generation: a token, the first one and memory against the cut, in one file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from edge_client.pages.rendering import render as page_of
from edge_client.pages.rendering import stem
from edge_client.pages.words import duration
from edge_client.planning.explain import round_trip
from edge_client.planning.generation.predict import GenerationCandidate
from edge_client.planning.link import Link
from edge_client.screen.text import size
from edge_client.tasks.planned_generation import PlannedGeneration
from shared_hooks.errors import SpecError

TEMPLATE: Final = Path(__file__).parent / "generation_page.html.j2"
ROUND_TRIPS_MS: Final = (5, 20, 50, 100)
PROMPTS: Final = (128, 512, 2048)
HEADERS: Final = (
    "cut after",
    "a token",
    "to the first",
    "a reply",
    "edge",
    "network",
    "server",
    "up",
    "down",
    "memory",
)
CONTENTS: Final = (
    ("token", "a token"),
    ("first", "the first token"),
    ("memory", "memory"),
    ("cuts", "all cuts"),
)


def write_page(found: PlannedGeneration, path: str | Path) -> None:
    """Raises SpecError where it cannot be written, or jinja2 is missing."""
    try:
        Path(path).write_text(render(found), encoding="utf-8")
    except ImportError as error:
        raise SpecError('a report needs jinja2: pip install "isthmus[sweep]"') from error
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror}") from error


def render(found: PlannedGeneration) -> str:
    """As HTML."""
    rows, work = found.rows(), found.workload
    return page_of(
        TEMPLATE,
        ("lines",),
        {"file": stem(f"{found.model}-generation"), "model": found.model, "charts": _charts(found)},
        title=f"{found.model}: where to cut a generation",
        kicker="Isthmus plan",
        heading=f"Where to cut {found.model} for generation",
        lead=f"Predicted for {work.new_tokens} tokens after {work.prompt_tokens}. {found.title()}.",
        partial=None,
        contents=list(CONTENTS),
        cards=_cards(found),
        headers=list(HEADERS),
        rows=[_row(row) for row in rows],
        best=[at for at, row in enumerate(rows) if row["best"]],
        below=found.below(),
    )


def _cards(found: PlannedGeneration) -> list[dict[str, str]]:
    def best(title: str, key: Callable[[GenerationCandidate], float]) -> dict[str, str]:
        one = min(found.candidates, key=key)
        text = f"{one.tokens_per_second:.1f} tokens/s, {duration(one.first.latency_ns)} to the first"
        return {"title": title, "figure": duration(key(one)), "name": one.name, "text": text}

    return [
        best("Fastest token", lambda one: one.token.latency_ns),
        best("Fastest first token", lambda one: one.first.latency_ns),
        best("Fastest reply", lambda one: one.reply.latency_ns),
    ]


def _charts(found: PlannedGeneration) -> list[dict[str, Any]]:
    """Lines as (number of the block, value)."""
    measured, work = found.measured, found.workload

    def token(link: Link) -> list[GenerationCandidate]:
        return measured.candidates(work, link)

    links = {f"{_ms(found.link.rtt_ns)} ms, as planned": found.link}
    links |= {f"{rtt} ms": round_trip(found.link, rtt * 1e6) for rtt in ROUND_TRIPS_MS}
    tokens = [(f"round trip {name}", _line(token(link), _token_ms)) for name, link in links.items()]
    blocks = range(len(measured.edge.blocks))
    alone = [[at, _token_ms(found.candidates[0])] for at in blocks]
    prompts = sorted({*PROMPTS, work.prompt_tokens})
    firsts = [
        (
            f"{prompt} tokens",
            _line(measured.candidates(replace(work, prompt_tokens=prompt), found.link), _first_ms),
        )
        for prompt in prompts
    ]
    memory = [
        ("edge", _line(found.candidates, lambda one: (one.token.edge_memory.value or 0) / 2**20)),
        ("server", _line(found.candidates, lambda one: (one.cloud_weights_bytes + one.cloud_state_bytes) / 2**20)),
    ]
    return [
        _chart("token", "A token", "ms", [*tokens, ("edge-only", alone)]),
        _chart("first", "The first token", "ms", firsts),
        _chart("memory", "Memory at the end of the reply", "MiB", memory),
    ]


def _line(
    candidates: Sequence[GenerationCandidate], value: Callable[[GenerationCandidate], float]
) -> list[list[float]]:
    return [[one.token.layer_id, value(one)] for one in candidates if one.token.layer_id is not None]


def _token_ms(one: GenerationCandidate) -> float:
    return one.token.latency_ns / 1e6


def _first_ms(one: GenerationCandidate) -> float:
    return one.first.latency_ns / 1e6


def _chart(key: str, title: str, unit: str, series: Sequence[tuple[str, list[list[float]]]]) -> dict[str, Any]:
    drawn = [{"name": name, "points": points} for name, points in series]
    return {"key": key, "title": title, "unit": unit, "series": drawn}


def _row(row: dict[str, Any]) -> list[str]:
    times = ("token_ns", "first_token_ns", "reply_ns", "edge_ns", "network_ns", "server_ns")
    sizes = ("bytes_up", "bytes_down", "edge_memory_bytes")
    return [row["name"], *(duration(row[key]) for key in times), *(size(round(row[key])) for key in sizes)]


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.3g}"
