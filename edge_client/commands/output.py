"""What commands print. Where JSON is asked for, standard output holds that and nothing else."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any, TextIO

from edge_client.screen.table import table as table
from edge_client.screen.text import finite, one_line
from shared_hooks.errors import SpecError


def say(text: str) -> None:
    """One line for people, beside what was asked for."""
    print(f"edge-client: {one_line(text)}", file=sys.stderr, flush=True)


def screen_width() -> int | None:
    """The width of the terminal; None where standard output is none: a file is as wide as its lines."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def write_json(value: Any, target: str, stdout: TextIO) -> None:
    """``value`` as JSON to a file, or to ``stdout`` for "-". NaN and infinities become null: JSON has none."""
    text = json.dumps(finite(value), indent=2, allow_nan=False) + "\n"
    if target == "-":
        stdout.write(text)
        stdout.flush()
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"--json: {target} cannot be written: {error.strerror}") from error


def check_json_target(target: str | None) -> None:
    """SpecError, before hours of work, for a file that could not be written after them."""
    if target is None or target == "-":
        return
    path = Path(target)
    known = path.exists()
    if known and not path.is_file() and not path.is_dir():
        return  # whoever reads a pipe would take this for its end
    try:
        path.open("ab").close()
        if not known:
            path.unlink()
    except OSError as error:
        raise SpecError(f"--json: {target} cannot be written: {error.strerror}") from error
