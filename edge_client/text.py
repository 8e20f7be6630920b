"""Text from elsewhere - file names, labels, a server's errors - made fit for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """``text`` with what does not print escaped: control characters would clear, colour or rewrite a terminal."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def one_line(text: str) -> str:
    """``text`` as one printable line."""
    return printable(" ".join(text.split()))
