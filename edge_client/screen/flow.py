"""Text that comes in pieces, onto a screen or into a file."""

from __future__ import annotations

import shutil
from typing import Final, TextIO

from rich.cells import cell_len

from edge_client.screen.text import printable

LEAST: Final = 10
"""Columns of a terminal on which words are kept whole."""


class Flow:
    """Writes pieces at once. On a terminal a word that does not fit at the end of a line goes whole to the next one.

    Control characters other than the end of a line are written escaped: a model may say anything.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._width = shutil.get_terminal_size().columns - 1 if out.isatty() else 0
        self._column = 0
        self._word = ""
        self._open = False

    def write(self, text: str) -> None:
        """One piece, of any length."""
        for one in text:
            self._put("\n" if one == "\n" else " " if one == "\t" else printable(one))
        self._out.flush()

    def end(self) -> None:
        """The line is ended, if one is open."""
        if self._open:
            self._put("\n")
            self._out.flush()

    def _put(self, one: str) -> None:
        if one == "\n":
            self._out.write(one)
            self._column, self._word, self._open = 0, "", False
            return
        self._open = True
        size = cell_len(one)
        if self._width >= LEAST and self._column + size > self._width and self._turn(one):
            return
        self._word = "" if one == " " else self._word + one
        self._column += size
        self._out.write(one)

    def _turn(self, one: str) -> bool:
        """Goes on in the next line, with the word that is under way; True where ``one`` is not needed there."""
        if one == " ":
            self._out.write("\n")
            self._column, self._word = 0, ""
            return True
        size = cell_len(self._word)
        if size >= self._column:  # longer than a line
            self._word = ""
        elif size:
            self._out.write(f"\x1b[{size}D\x1b[K")
        self._out.write(f"\n{self._word}")
        self._column = cell_len(self._word)
        return False
