"""``edge-client verify``: every cut of a model against the whole model, in this process or through a server."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from typing import Final

from edge_client.commands import common
from edge_client.commands.common import check_json_target, chosen, keywords, write_json
from edge_client.commands.feed import choice_of, find
from edge_client.commands.report import table
from edge_client.screen.text import printable
from edge_client.settings import NONE
from edge_client.tasks.verify import Verified, verify
from edge_client.witness import Comparison

WIDTH: Final = 80
"""Width of sentences; a table is as wide as its cells."""


def main(options: argparse.Namespace) -> int:
    """Print the verdict (and JSON); status 1 unless every cut is exact or refused."""
    check_json_target(options.json)
    found = verify(
        chosen(options) or NONE,
        choice_of(options),
        find(options.input) if options.input else None,
        **keywords(options, verify),
    )
    if options.json != "-":
        print(_text(found.found) if isinstance(found.found, Verified) else found.text())
    if options.json:
        write_json(found.as_dict(), options.json, options.stdout)
    return common.OK if found.ok else common.SOME_FAILED


def _text(found: Verified) -> str:
    return "\n".join(
        line if "\n" in line else textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in _lines(found)
    )


def _lines(found: Verified) -> Iterator[str]:
    rows = [[str(one.layer_id), one.name, "refused", one.reason] for one in found.cuts if one.refused]
    for one in found.wrong:
        why = (
            one.reason or f"differs by {_apart(one.here)} from the whole model here, by {_apart(one.there)} from there"
        )
        rows.append([str(one.layer_id), one.name, "WRONG", why])
    if rows:
        yield table(["id", "name", "cut", "reason"], rows, right=(0,))
        yield ""
    exact = sum(one.is_exact for one in found.answered)
    yield (
        f"{len(found.answered)} cuts answered, {exact} of them bit for bit as the whole model on one of the two sides, "
        f"{sum(one.refused for one in found.cuts)} refused"
    )
    if found.sides is None:
        yield "the whole model on the server is not known: it may not be cut before its first layer"
    elif found.sides.bits:
        yield "the whole model gives the same bits on both sides"
    else:
        yield f"the whole model differs between the sides by {_apart(found.sides)}"
    if found.largest:
        top1 = "" if found.top1 is None else f"; top-1 the same in {100 * found.top1:.4g} % of its rows"
        yield f"the answer furthest from the whole model here: {found.largest:.2g} of the output's scale{top1}"
    if found.notes:
        yield f"without any effect on results: {'; '.join(map(printable, found.notes))}"
    if found.unlike:
        unlike = printable("; ".join(found.unlike))
        allowed = f"up to {found.limit:.2g} of the output's scale is allowed"
        yield f"{allowed}, for the last bits are not promised between these machines ({unlike})"
    yield "ok" if found.ok else "NOT OK"


def _apart(found: Comparison | None) -> str:
    return "nothing" if found is None or found.bits else f"{found.largest:.2g} of the output's scale"
