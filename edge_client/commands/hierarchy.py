"""``edge-client hierarchy``: what a model is made of, what of it ran, and its ONNX files with every node tagged."""

from __future__ import annotations

import argparse

from edge_client.commands import common
from edge_client.commands.feed import choice_of, find, keywords
from edge_client.commands.report import check_json_target, write_json
from edge_client.tasks.hierarchy import hierarchy
from edge_client.tasks.subject import print_tree


def main(options: argparse.Namespace) -> int:
    """Map, print, export, check; exit status."""
    check_json_target(options.json)
    found = hierarchy(
        choice_of(options),
        find(options.input) if options.input else None,
        **keywords(options, hierarchy),
    )
    if options.json:
        write_json(found.as_dict(), options.json, options.stdout)
    if options.json != "-":
        print_tree(found.map, options.stdout)
        print("\n" + "\n".join(found.lines()), file=options.stdout)
    return common.OK if found.ok else common.SOME_FAILED
