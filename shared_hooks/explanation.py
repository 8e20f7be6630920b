"""What crosses a cut and why, and what the tail does with it, as facts and as text. Worked out in `explaining`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from shared_hooks.showing import short

WIDTH = 80
_STEPS = 24
_ROWS = 12


@dataclass(frozen=True, slots=True)
class Sent:
    """One storage that crosses. ``value``: what it is: an input, or what made it and where; ``written_before``: what
    wrote it in place last before the cut. ``sent_bytes`` of ``storage_bytes`` cross, in ``pieces`` pieces.

    ``read_by``: what reads it first after the cut, or "the output"; nothing if nobody on this path does; ``read_more``:
    how many read it after that. ``written_by``: what writes it in place first after the cut. ``other_path``: another
    known path through the model reads it.
    """

    slot: int
    value: str
    written_before: str
    dtype: str
    shape: tuple[int, ...]
    sent_bytes: int
    storage_bytes: int
    pieces: int
    read_by: str
    read_more: int
    written_by: str
    other_path: bool


@dataclass(frozen=True, slots=True)
class CallReports:
    """What is said of a place before the cut: ``what`` it is ("item", an operation, a module), ``where`` in the model.

    ``value``: of a Python value that was read from data, as the plan saw it; every request brings its own.
    """

    what: str
    where: str
    value: str = ""


@short
@dataclass(frozen=True, slots=True)
class Explanation:
    """A cut on inputs of one form: what is sent, what is said, and what the tail does up to the cut.

    ``whole``: Python reads data after the cut, so that storages cross whole. ``reads``: values that Python read from
    data before it; ``given``: forms that cannot be worked out without data; ``generators``: of which the state is sent.
    ``description_bytes``: of the cut's description, sent once a stream. ``skipped`` and ``entered`` module calls,
    ``answered``, ``read`` and ``run`` operations are those of ``steps``, a line each, indented by module.
    """

    layer_id: int
    layer_name: str
    layer_type: str
    sent: tuple[Sent, ...]
    whole: bool
    reads: tuple[CallReports, ...]
    given: tuple[CallReports, ...]
    generators: tuple[str, ...]
    description_bytes: int
    skipped: int
    entered: int
    answered: int
    read: int
    run: int
    steps: tuple[str, ...]
    is_block: bool = False
    """Whether the cut is after a block, whose last layer is ``layer_id``."""

    @property
    def sent_bytes(self) -> int:
        """Raw bytes of the frontier."""
        return sum(one.sent_bytes for one in self.sent)

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = WIDTH, *, everything: bool = False) -> str:
        """Lines of at most ``width`` characters, where names allow it; long lists folded unless ``everything``."""
        lines = [line for part in self._parts(everything) for line in part]
        return "\n".join(wrapped for line in lines for wrapped in _wrapped(line, width))

    def _parts(self, everything: bool) -> Iterator[list[str]]:
        yield [self._title(), ""]
        yield self._what_crosses(everything)
        for title, values in (("Python values read from data before the cut", self.reads), (_GIVEN, self.given)):
            if values:
                rows = [f"  {one.what} in {one.where}" + (f": {one.value}" if one.value else "") for one in values]
                yield ["", f"{title}: {len(values)}", *_folded(rows, _ROWS, everything)]
        yield ["", *self._what_the_tail_does(everything)]

    def _title(self) -> str:
        if self.layer_id < 0:
            return "cut before the first layer: the inputs cross, the whole model is the tail"
        what = "block" if self.is_block else f"layer {self.layer_id}:"
        return f"cut after {what} {self.layer_name} ({self.layer_type})"

    def _what_crosses(self, everything: bool) -> list[str]:
        rows = [
            f"Crossing with each request: {_bytes(self.sent_bytes)} in {_count(len(self.sent), 'storage')}",
        ]
        if self.whole:
            rows.append("  whole, because Python reads data after the cut and may then read any part of them")
        blocks = [self._slot(one) for one in self.sent]
        shown = blocks if everything else blocks[:_ROWS]
        rows += [line for block in shown for line in block]
        if len(shown) < len(blocks):
            rows.append(f"  ({len(blocks) - len(shown)} more)")
        for name in self.generators:
            rows.append(f"  the state of {_GENERATORS.get(name, name)}")
        return [*rows, f"Once a stream: the cut's description, {_bytes(self.description_bytes)}"]

    def _slot(self, one: Sent) -> list[str]:
        size = _bytes(one.sent_bytes)
        if one.sent_bytes < one.storage_bytes:
            size += f" of {_bytes(one.storage_bytes)}"
        if one.pieces > 1:
            size += f" in {one.pieces} pieces"
        made = f"    is {one.value}"
        if one.written_before:
            made += f", written in place by {one.written_before}"
        return [f"  slot {one.slot}: {one.dtype}[{', '.join(map(str, one.shape))}], {size}", made, *_why(one)]

    def _what_the_tail_does(self, everything: bool) -> list[str]:
        if not self.steps:
            return ["The tail begins at once: nothing is skipped, entered or replayed."]
        parts = [
            _count(self.skipped, "module call") + " skipped" if self.skipped else "",
            f"{self.entered} entered" if self.entered else "",
            _count(self.answered, "operation") + " answered without running" if self.answered else "",
            _count(self.read, "value") + " taken from the request" if self.read else "",
            _count(self.run, "operation") + " run again" if self.run else "",
        ]
        rows = [
            f"The tail up to the cut: {', '.join(part for part in parts if part)}",
            "  (operations on constants simply run, and are not listed)",
        ]
        return [*rows, *_folded([f"  {step}" for step in self.steps], _STEPS, everything)]


_GIVEN = "Added to it, because the other side cannot work it out without data"
_GENERATORS = {
    "torch": "torch's random number generator, as it is at the cut",
    "python": "Python's random number generator, as the forward begins",
    "numpy": "NumPy's random number generator, as the forward begins",
}


def _why(one: Sent) -> Iterator[str]:
    if one.read_by:
        more = f", and {one.read_more} more after that" if one.read_more else ""
        yield f"    read by {one.read_by}{more}"
    if one.written_by:
        also = "also " if one.read_by else "sent for its memory's form only: "
        yield f"    {also if one.read_by or not one.sent_bytes else ''}written in place by {one.written_by}"
    if one.other_path:
        yield f"    another known path through the model reads it{', too' if one.read_by else ''}"
    elif not one.read_by and not one.written_by:
        yield "    nothing of it is read; its form is"


def _bytes(number: int) -> str:
    return f"{number:,} byte{'' if number == 1 else 's'}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _folded(rows: list[str], most: int, everything: bool) -> list[str]:
    """The first third and the last two thirds of a long list: what is near the cut comes last."""
    if everything or len(rows) <= most + 1:
        return rows
    first = most // 3
    return [*rows[:first], f"  ({len(rows) - most} more)", *rows[first - most :]]


def _wrapped(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(
        line.strip(),
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
