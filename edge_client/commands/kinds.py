"""What the text of an option may be; they load nothing. Each raises ArgumentTypeError."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def number(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return int(text)


def pixels(text: str) -> tuple[int, int]:
    """WIDTHxHEIGHT."""
    width, cross, height = text.lower().partition("x")
    if not (cross and width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise argparse.ArgumentTypeError(f'expected WIDTHxHEIGHT in pixels, such as 640x480, found "{text}"')
    return int(width), int(height)


def names(text: str) -> list[str]:
    """Names with commas between."""
    return [name.strip() for name in text.split(",")]


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return value


def seconds(text: str) -> float:
    """A time above 0."""
    return _above_0(text, "a number of seconds")


def rate(text: str) -> float:
    """A number above 0."""
    return _above_0(text, "a number")


def rates(text: str) -> list[float]:
    """Numbers above 0 with commas between."""
    return [rate(one.strip()) for one in text.split(",")]


def some_seconds(text: str) -> float:
    """A time of 0 or more."""
    return 0.0 if text.strip() in ("0", "0.0") else seconds(text)


def _above_0(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what} above 0")
    return value
