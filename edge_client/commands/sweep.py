"""``edge-client sweep``: real inputs through every cut, in tables and on a page."""

from __future__ import annotations

import argparse

from edge_client.commands import common
from edge_client.commands.common import check_json_target, chosen, keywords, say, write_json
from edge_client.commands.feed import choice_of
from edge_client.core import CONNECTION_ERRORS
from edge_client.settings import NONE
from edge_client.sweeping import settings
from edge_client.tasks.sweep import Swept, sweep
from shared_hooks.errors import HookRefused


def main(options: argparse.Namespace) -> int:
    """Measure what is not measured yet, write the results; exit status."""
    settings.check()
    check_json_target(options.json)
    found = sweep(
        chosen(options) or NONE,
        choice_of(options),
        options.input,
        say=_say,
        **keywords(options, sweep),
    )
    status = _status(found)
    if isinstance(found.failure, CONNECTION_ERRORS):
        say(found.ended or "")
    if found.summary is None:
        say(f"{found.text()}; the same command tries again")
        return status
    print(found.text(), flush=True)
    print(f"report: {found.report}", flush=True)
    if found.ended is not None:
        inputs = f"{found.measured} of {found.inputs} inputs are measured"
        say(f"{found.ended}: {inputs}; the same command continues where it stopped")
    if options.json:
        write_json({**found.as_dict(), "exit_status": status}, options.json, options.stdout)
    return status


def _status(found: Swept) -> int:
    if isinstance(found.failure, KeyboardInterrupt):
        return common.INTERRUPTED
    if isinstance(found.failure, HookRefused):
        return common.USAGE
    if found.failure is not None:
        return common.CONNECTION
    return common.SOME_FAILED if any(way.failed for way in found.ways) else common.OK


def _say(line: str) -> None:
    """Print the journal on standard output, all else beside it."""
    if line.startswith(("warning:", "starting")):
        say(line)
    else:
        print(line, flush=True)
