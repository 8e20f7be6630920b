"""``edge-client bench``: an open load on a server."""

from __future__ import annotations

import argparse

from edge_client.commands import common
from edge_client.commands.common import needed, say
from edge_client.commands.feed import choice_of, keywords
from edge_client.commands.report import check_json_target, screen_width, write_json
from edge_client.sweeping import settings
from edge_client.tasks.bench import bench
from shared_hooks.files import write_text


def main(options: argparse.Namespace) -> int:
    """Load it, print, write; exit status. What was measured before Ctrl-C, or before the server went, is written."""
    check_json_target(options.json)
    if options.html:
        settings.check("jinja2")
        write_text(options.html, "", "--html")
    found = bench(
        needed(options),
        choice_of(options),
        options.input,
        say=say,
        **keywords(options, bench),
    )
    if options.json:
        write_json(found.as_dict(), options.json, options.stdout)
    if options.html:
        write_text(options.html, found.page(), "--html")
    if options.json != "-":
        print(found.text(screen_width()), file=options.stdout)
    if isinstance(found.failure, KeyboardInterrupt):
        return common.INTERRUPTED
    return common.OK if found.failure is None else common.CONNECTION
