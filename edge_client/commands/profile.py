"""``edge-client profile``: where this side's (and the server's) time, memory and energy go, layer by layer."""

from __future__ import annotations

import argparse

from edge_client.commands import common
from edge_client.commands.common import chosen, say
from edge_client.commands.feed import choice_of, find, keywords
from edge_client.commands.report import check_json_target, screen_width, write_json
from edge_client.settings import NONE
from edge_client.tasks.profile import profile


def main(options: argparse.Namespace) -> int:
    """Measure, print tables, write JSON; status 3 where the server's profile could not be had."""

    server = None if options.side == "edge" else chosen(options)
    check_json_target(options.json)
    found = profile(
        server or NONE,
        choice_of(options),
        find(options.input) if options.input else None,
        say=say,
        **keywords(options, profile),
    )
    if (error := found.failure) is not None:
        say(f"error: {type(error).__name__}: {error}")
    for one in found.profiles:
        if one.whole_energy.value is None:
            say(f"{one.side}: {one.whole_energy.note}")
    if options.json != "-":
        print(found.text(screen_width()), flush=True)
    if options.json:
        write_json(found.as_dict(), options.json, options.stdout)
    return common.OK if found.failure is None else common.CONNECTION
