"""What was found: ok, warning or wrong, and how to mend it."""

from __future__ import annotations

import shutil
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Final, TextIO

from shared_hooks.errors import IsthmusError
from shared_hooks.lifecycle.log_bounds import one_line

WIDEST: Final = 120
INDENT: Final = 22


class Level(str, Enum):
    OK = "ok"
    WARNING = "warning"  # it works, and may not do so for long, or not as well as it could
    WRONG = "wrong"  # it does not work, or is not safe


@dataclass(frozen=True, slots=True)
class Finding:
    """``about``: a word or two, the same on every run; ``mend``: what to do, empty where nothing is to be done."""

    level: Level
    about: str
    says: str
    mend: str = ""

    @property
    def line(self) -> str:
        return f"{self.says}. To mend: {self.mend}" if self.mend else self.says


def ok(about: str, says: str) -> Finding:
    return Finding(Level.OK, about, says)


def warning(about: str, says: str, mend: str) -> Finding:
    return Finding(Level.WARNING, about, says, mend)


def wrong(about: str, says: str, mend: str) -> Finding:
    return Finding(Level.WRONG, about, says, mend)


def contained(about: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """``findings``; where looking for them fails, that is one. So one look that breaks costs no other."""
    try:
        yield from findings
    except IsthmusError as error:
        yield wrong(about, f"{type(error).__name__}: {error}", "mend that, and look again")
    except Exception as error:
        yield wrong(about, f"looking at it failed: {type(error).__name__}: {error}", "please report it")


def report(findings: Iterable[Finding], out: TextIO | None) -> list[Finding]:
    """All of them; each is written to ``out``, if there is one, as soon as it is found."""
    found: list[Finding] = []
    width = min(shutil.get_terminal_size().columns, WIDEST) if out is not None and out.isatty() else None
    for one in findings:
        found.append(one)
        if out is not None:
            print(_shown(one, width), file=out, flush=True)
    if out is not None:
        print(", ".join(f"{count} {level}" for level, count in counts(found).items()), file=out, flush=True)
    return found


def counts(found: Iterable[Finding]) -> dict[str, int]:
    """How many there are of each level, the worst first."""
    levels = Counter(one.level for one in found)
    return {level.value: levels[level] for level in reversed(Level)}


def as_json(found: Iterable[Finding]) -> dict[str, Any]:
    """As ``--json`` has it."""
    found = list(found)
    return {**counts(found), "findings": [asdict(one) for one in found]}


def _shown(one: Finding, width: int | None) -> str:
    """A line; on a terminal of ``width`` columns folded below itself. What the other side says may hold anything."""
    text = f"{one.level.value:<8} {one.about:<12} {one_line(one.line)}"
    if width is None:
        return text
    return textwrap.fill(text, width, subsequent_indent=" " * INDENT, break_long_words=False, break_on_hyphens=False)
