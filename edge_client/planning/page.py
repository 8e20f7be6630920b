"""Render a plan as a page without network requests: the model's graph, where each part runs, and the gain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from edge_client.pages import blocks, counted, duration, stem
from edge_client.pages import render as page_of
from edge_client.planning.mincut import INPUTS, Best
from edge_client.planning.objective import Candidate, Decision
from edge_client.screen import printable, size

TEMPLATE: Final = Path(__file__).parent / "page.html.j2"
MOST_NODES: Final = 40
"""Maximum number of nodes drawn one by one; beyond it those of a block on one side are merged."""
MOST_ROWS: Final = 30
"""Rows of the table, the best first."""


def render(model: str, decision: Decision, candidates: Sequence[Candidate], best: Best | None) -> str:
    """Render a plan, and if sets of calls were compared, the ``best`` of all, as HTML."""
    model = printable(model)
    ranking = list(decision.ranking[:MOST_ROWS])
    graph = None if best is None else drawn(best)
    folded = best is not None and len(best.graph.nodes) > MOST_NODES
    return page_of(
        TEMPLATE,
        (),
        {"file": stem(f"{model}-plan"), "model": model, "graph": graph},
        title=f"{model}: plan",
        kicker="Isthmus plan",
        heading=f"{model}: what runs where",
        lead=f"{counted(len(candidates), 'way')} to run a request, predicted from both sides' profiles and the link.",
        partial=None if best is None or not best.reason else f"the least of all sets cannot be cut: {best.reason}",
        contents=[*([] if graph is None else [("graph", "the graph and its cut")]), ("ways", "every way")],
        cards=_cards(decision, best),
        has_graph=graph is not None,
        folded=folded,
        here=0 if best is None else len(best.own),
        nodes=0 if best is None else len(best.graph.nodes),
        rows=_table(ranking, decision),
        left_out=len(candidates) - len(ranking),
        rejection=decision.rejection(candidates) if decision.rejected else None,
    )


def _cards(decision: Decision, best: Best | None) -> list[dict[str, str]]:
    winner, plain = decision.winner, decision.best_cut
    cards = [_card(f"Best in {decision.objective}", duration(winner.latency_ns), winner.key, size(winner.bytes_up))]
    if plain is not None and plain is not winner:
        cards.append(_card("Best single cut", duration(plain.latency_ns), plain.key, size(plain.bytes_up)))
    if best is not None:
        gain = "a single cut, or none" if best.is_plain else "the best set of all"
        if plain is not None and not best.is_plain:
            gain = f"{plain.latency_ns / best.latency_ns:.2f}x of the best single cut's speed"
        names = printable(" + ".join(best.names)) or "everything on the server"
        cards.append(
            _card("Best along branches", duration(best.latency_ns), names, f"{size(best.bytes_up)} up, {gain}")
        )
    return cards


def _card(title: str, figure: str, name: str, text: str) -> dict[str, str]:
    return {"title": title, "figure": figure, "name": printable(name), "text": text}


def _table(shown: Sequence[Candidate], decision: Decision) -> tuple[list[str], list[list[str]], list[int]]:
    headers = ["cut after", "codec", "latency", "edge", "network", "server", "bytes up"]
    rows = [
        [
            printable(one.name),
            one.codec or "-",
            duration(one.latency_ns),
            *(duration(sum(one.stages_ns.get(stage, 0.0) for stage in stages)) for stages in _STAGES),
            size(one.bytes_up),
        ]
        for one in shown
    ]
    return headers, rows, [at for at, one in enumerate(shown) if one is decision.winner]


_STAGES: Final = (("prepare", "edge", "encode", "finish"), ("network",), ("queue", "tail"))


def drawn(best: Best) -> dict[str, Any]:
    """Return the graph as JSON data: ``nodes`` with their side, time there, and place (``level`` from the top, ``lane``
    of ``lanes``); ``edges`` between them with their bytes, and whether they cross the cut.
    """
    nodes, own = best.graph.nodes, best.own
    names = [node.name for node in nodes]
    block = {} if len(nodes) <= MOST_NODES else blocks(names)
    group_of: list[int] = []
    groups: list[dict[str, Any]] = [{"name": "input", "edge": True, "ns": 0.0, "count": 0}]
    known: dict[Any, int] = {}
    for number, node in enumerate(nodes):
        here = number in own
        key = (block[node.name], here) if block else number
        if key not in known:
            known[key] = len(groups)
            groups.append({"name": printable(block.get(node.name, node.name)), "edge": here, "ns": 0.0, "count": 0})
        group = groups[known[key]]
        group["ns"] += node.edge_ns if here else node.cloud_ns
        group["count"] += 1
        group_of.append(known[key])
    sizes: dict[tuple[int, int], int] = {}
    for tensor in best.graph.tensors:
        makers = {0 if number == INPUTS else group_of[number] for number in tensor.made}
        for pair in {(one, group_of[reader]) for one in makers for reader in tensor.read}:
            if pair[0] != pair[1]:
                sizes[pair] = sizes.get(pair, 0) + tensor.nbytes
    fed = {b for _, b in sizes}
    for number, node in enumerate(nodes):  # views have no memory of their own
        if (mine := group_of[number]) not in fed:
            sizes |= {(group_of[one], mine): 0 for one in node.needs if group_of[one] != mine}
    _place(groups, sizes)
    edges = [
        {"from": a, "to": b, "bytes": nbytes, "crosses": nbytes > 0 and groups[a]["edge"] and not groups[b]["edge"]}
        for (a, b), nbytes in sizes.items()
    ]
    return {"nodes": groups, "edges": edges}


def _place(groups: list[dict[str, Any]], edges: dict[tuple[int, int], int]) -> None:
    """Place nodes below all that they read, ordered by the mean place of what they read."""
    before: dict[int, list[int]] = {}
    for a, b in edges:
        if a < b:  # of mutually dependent blocks, the one that ran first
            before.setdefault(b, []).append(a)
    levels: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        group["level"] = 1 + max((groups[one]["level"] for one in before.get(number, ())), default=-1)
        levels.setdefault(group["level"], []).append(number)
    place: dict[int, float] = {}
    for _, mine in sorted(levels.items()):
        wanted = {one: [place[each] for each in before.get(one, ())] for one in mine}
        mine.sort(key=lambda one: sum(wanted[one]) / len(wanted[one]) if wanted[one] else 0.5)
        for lane, one in enumerate(mine):
            groups[one]["lane"], groups[one]["lanes"] = lane, len(mine)
            place[one] = (lane + 0.5) / len(mine)
