"""``edge-client bench``: an open load on a server."""

from __future__ import annotations

import argparse
from pathlib import Path

from edge_client.commands import common
from edge_client.commands.common import needed, say
from edge_client.commands.feed import choice_of, keywords
from edge_client.commands.report import check_json_target, screen_width, write_json
from edge_client.sweeping import settings
from edge_client.tasks.bench import bench
from shared_hooks.errors import SpecError


def main(options: argparse.Namespace) -> int:
    """Load it, print, write; exit status. What was measured before Ctrl-C, or before the server went, is written."""
    check_json_target(options.json)
    if options.html:
        settings.check("jinja2")
        _write(options.html, "")
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
        _write(options.html, found.page())
    if options.json != "-":
        print(found.text(screen_width()), file=options.stdout)
    if isinstance(found.failure, KeyboardInterrupt):
        return common.INTERRUPTED
    return common.OK if found.failure is None else common.CONNECTION


def _write(file: str, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SpecError(f"--html: {file} cannot be written: {error.strerror}") from error
