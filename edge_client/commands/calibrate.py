"""``edge-client calibrate``: what every codec costs in answers, at every cut, on the user's own inputs."""

from __future__ import annotations

import argparse

from edge_client.commands import common
from edge_client.commands.common import say
from edge_client.commands.feed import choice_of, keywords
from edge_client.commands.report import check_json_target, write_json
from edge_client.tasks.calibrate import calibrate


def main(options: argparse.Namespace) -> int:
    """Calibrate, print; exit status."""
    check_json_target(options.json)
    found = calibrate(
        choice_of(options),
        options.input,
        **keywords(options, calibrate),
        say=say,
    )
    for text in found.warnings:
        say(f"warning: {text}")
    if options.json:
        write_json(found.as_dict(), options.json, options.stdout)
    if options.json != "-":
        print(found.text(), file=options.stdout)
    return common.OK
