"""``edge-client prune``: score a layer's channels, judge every choice, write masks and smaller models, measure them."""

from __future__ import annotations

import argparse

from edge_client.commands import common
from edge_client.commands.common import say
from edge_client.commands.feed import choice_of, keywords
from edge_client.commands.report import check_json_target, write_json
from edge_client.screen.text import one_line
from edge_client.tasks.prune import prune
from shared_hooks.errors import SpecError


def main(options: argparse.Namespace) -> int:
    """Prune, print; exit status."""

    check_json_target(options.json)
    if options.selection is not None:
        raise SpecError("--selection: prune begins with the whole model")
    found = prune(
        choice_of(options),
        options.split,
        options.input,
        serve=None if options.serve else False,
        **keywords(options, prune, "serve"),
    )
    if options.json:
        write_json(found.as_dict(), options.json, options.stdout)
    if options.json != "-":
        print(found.text(), file=options.stdout)
        for name, why in found.report.trial.unavailable.items():
            say(f"{name} is not available: {one_line(why)}")
    return common.OK if found.all_exact else common.SOME_FAILED
