"""The inputs that codecs are judged on, and their labels: a folder per class, names that say it, or a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_client.given import Given, given, labelled
from edge_client.pruning.data import find
from edge_client.spoken import option
from shared_hooks.errors import SpecError, near

Data = str | Path | Iterable[Any]
"""A folder or a glob of files; or inputs in memory, or pairs of one and its label."""


def inputs_of(data: Data, labels: str | Path | None = None) -> list[Given]:
    """Every input once, with its label where there is one. Raises SpecError, InputMismatch."""
    if isinstance(data, (str, Path)):
        found = find(str(data), option("inputs"))
    else:
        items = list(data)
        pairs = bool(items) and all(_is_pair(one) for one in items)
        found = labelled(items, option("inputs")) if pairs else given(items)
    return found if labels is None else _with_labels(found, Path(labels))


def _is_pair(one: Any) -> bool:
    """(input, label): a label is a text or a number, which no model takes for a tensor."""
    return isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], (str, int))


def _with_labels(found: Sequence[Given], file: Path) -> list[Given]:
    known = _read(file)
    used: dict[str, Given] = {}
    made = []
    for one in found:
        names = [one.origin, one.name, one.file_name]
        key = next((name for name in names if name in known), None)
        if key is None:
            made.append(one)
            continue
        if (other := used.setdefault(key, one)) is not one:
            raise SpecError(f'{file}: "{key:.80}" is {other.origin} as well as {one.origin}: name them in full')
        label = known[key]
        made.append(
            replace(one, label=label) if one.item is None else replace(one, item=replace(one.item, truth=label))
        )
    missing = [name for name in known if name not in used]
    if missing:
        raise SpecError(
            f"{file}: {len(missing)} of {len(known)} labels are of no input, such as "
            f'"{missing[0]:.80}".{near(missing[0], [one.file_name for one in found])}'
        )
    return made


def _read(file: Path) -> dict[str, str]:
    """Two columns, file and label; a first line that says so is none of them."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            rows = [row for row in csv.reader(text) if row]
    except OSError as error:
        raise SpecError(f"{option('labels')}: {file} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise SpecError(f"{option('labels')}: {file} is no CSV file: {error}") from error
    if rows and [cell.strip().lower() for cell in rows[0][:2]] in (["file", "label"], ["filename", "label"]):
        del rows[0]
    known: dict[str, str] = {}
    for number, row in enumerate(rows, 1):
        if len(row) != 2:
            raise SpecError(f"{file}: row {number}: expected a file's name and its label, found {len(row)} columns")
        name, label = (cell.strip() for cell in row)
        if known.setdefault(name, label) != label:
            raise SpecError(f'{file}: "{name:.80}" has two labels, "{known[name]:.40}" and "{label:.40}"')
    if not known:
        raise SpecError(f"{file} holds no label: expected rows of a file's name and its label")
    return known
