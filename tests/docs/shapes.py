"""What a page shows of an output, against what comes out: exactly, but for what a note says varies.

A shown line that begins with ``...`` stands for any number of lines. ``varies: times`` leaves out times, shares, rates,
ports and process numbers, in sentences and in columns of tables; ``varies: numbers`` every number; ``varies: names``
also which cut of `digits` it is, and which is marked as the best.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

NUMBER = r"-?\d[\d.,]*(?:e[+-]?\d+)?"
UNITS = r"ns|us|µs|ms|s|%|[kMG]?bit/s|[mµ]?[JW]|/s|requests/s|x"
TIME = re.compile(rf"(?<![\w.]){NUMBER} ?({UNITS})(?!\w)")
SHORT = re.compile(r"# (?:ns|us|µs)\b")
"""One and the same duration is shown in one of two units."""
PORT = re.compile(r"(127\.0\.0\.1|localhost):\d+|(process) \d+")
TIMED = re.compile(r"\b(ms|s|us|share|cpu|mJ|J|W|Mbit)\b|/s|%")
"""Matches the heading of a column whose numbers are times, or made of times."""
WHOLE = "edge-only|cloud-only|cloud-only-file|input|pool|classifier"
CUT = re.compile(rf"\b(?:{WHOLE}|[a-z]+\d*(?:\.\w+)+(?:#\d+)?)(?![\w-])")
SIZE = re.compile(rf"{NUMBER} (?:[KMG]i)?B\b")
RULE = re.compile(r"\s*-{2,}(\s+-{2,})+\s*")


PROGRESS = re.compile(r"\w[\w ]*: \d+ of \d+, .+ left")
"""Comes on standard error where work takes more than a second, and so on a busy machine alone."""


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if not PROGRESS.fullmatch(line.strip())]


def plain(text: str, varies: str) -> list[str]:
    """Lines to be compared: what varies is ``#``; so are widths, which follow from it."""
    lines = _lines(text)
    if varies == "names":
        lines = [SIZE.sub("#", CUT.sub("@", line.replace("* ", ""))) for line in lines]
    if varies in ("names", "numbers"):
        return [_narrow(SHORT.sub("# ms", re.sub(NUMBER, "#", line))) for line in lines]
    if varies == "times":
        lines = [SHORT.sub("# ms", TIME.sub(r"# \1", PORT.sub(r"\1\2 #", line))) for line in _columns(lines)]
    return [_narrow(line) if varies else line.rstrip() for line in lines]


def match(shown: Sequence[str], found: Sequence[str]) -> list[tuple[int, int]] | None:
    """For each stretch of shown lines between ``...``, where it is in ``found`` (from, to); None: not all are there."""
    stretches, places, at = _stretches(shown), [], 0
    for number, stretch in enumerate(stretches):
        size = len(stretch)
        last = number == len(stretches) - 1
        starts = [len(found) - size] if last else [0] if number == 0 else range(at, len(found) - size + 1)
        for start in starts:
            if start >= at and list(found[start : start + size]) == stretch and (number or start == 0):
                break
        else:
            return None
        at = start + size
        places.append((start, at))
    return places


def refreshed(shown: str, found: str, varies: str) -> str:
    """What a page is to show now: with the same lines left out, where these still stand for something; else all."""
    places = match(plain(shown, varies), plain(found, varies))
    lines = _lines(found)
    if places is None:
        return found.rstrip("\n")
    gaps = iter([line for line in shown.splitlines() if _gap(line)])
    parts = []
    for number, (start, end) in enumerate(places):
        parts += [next(gaps)] if number else []
        parts += lines[start:end]
    return "\n".join(parts)


def _stretches(lines: Sequence[str]) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for line in lines:
        if _gap(line):
            found.append([])
        else:
            found[-1].append(line)
    return found


def _gap(line: str) -> bool:
    return line.strip().startswith("...")


def _narrow(line: str) -> str:
    return re.sub(r"-{2,}", "--", re.sub(r"\s+", " ", line)).strip()


def _columns(lines: Sequence[str]) -> list[str]:
    """The lines of tables, with ``#`` in the columns of times; the others as they are."""
    made: list[str] = []
    spans: list[tuple[int, int]] = []
    heads = ""
    for number, line in enumerate(lines):
        if RULE.fullmatch(line) and number:
            heads, spans = lines[number - 1], [rule.span() for rule in re.finditer("-+", line)]
        elif any(line[end:start].strip() for (_, end), (start, _) in pairwise([(0, 0), *spans])):
            spans = []  # something stands between the columns: the table has ended
        made.append(line)
        for start, end in reversed(spans):
            if TIMED.search(heads[start:end]) and re.search(r"\d", line[start:end]):
                made[-1] = made[-1][:start] + "#" + made[-1][end:]
    return made
