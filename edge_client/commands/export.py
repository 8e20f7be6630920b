"""``edge-client export``: heads as ONNX files, for devices without PyTorch."""

from __future__ import annotations

import argparse

from edge_client.commands import common
from edge_client.commands.feed import choice_of, find, keywords
from edge_client.commands.report import check_json_target, write_json
from edge_client.tasks.export import export


def main(options: argparse.Namespace) -> int:
    """Export, print; exit status 1 where a cut was refused."""
    check_json_target(options.json)
    found = export(choice_of(options), find(options.input) if options.input else None, **keywords(options, export))
    if options.json:
        write_json({"folder": str(found.folder), "heads": found.rows()}, options.json, options.stdout)
    if options.json != "-":
        print(found.text(), file=options.stdout)
    return common.OK if found.ok else common.SOME_FAILED
