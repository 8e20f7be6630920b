"""``edge-client hooks``: the life cycle's hooks, stage after stage, in their order; with inputs, what they cost."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from edge_client.commands.output import check_json_target, table, write_json
from edge_client.text import one_line, printable
from shared_hooks.errors import SpecError
from shared_hooks.lifecycle import Lifecycle, Stage
from shared_hooks.lifecycle.listing import lines
from shared_hooks.lifecycle.loading import read


def main(options: argparse.Namespace) -> int:
    """List them, after the inputs have been run if there are any; exit status."""
    check_json_target(options.json)
    if options.stages:
        print(_stages())
        return 0
    lifecycle = configured(options)
    status = _run(options, lifecycle) if options.input else 0
    print("\n".join(lines(lifecycle)))
    heard = {one.stage for one in lifecycle.listing()}
    silent = [stage.value for stage in Stage if stage.edge and stage not in heard]
    print(f"\nnobody listens at {', '.join(silent)}")
    if options.json:
        write_json({"hooks": as_dicts(lifecycle)}, options.json, options.stdout)
    return status


def configured(options: argparse.Namespace) -> Lifecycle:
    """The hooks of ``--config``, of installed packages, and the default one, which logs as ``--log-level`` says."""
    if options.log_level:
        import logging

        logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return read("edge", Path(options.config) if options.config else None)


def as_dicts(lifecycle: Lifecycle) -> list[dict[str, Any]]:
    """The listing as JSON has it; cost in nanoseconds."""
    return [
        {
            "stage": one.stage.value,
            "hook": one.name,
            "priority": one.priority,
            "calls": one.calls,
            "failures": one.failures,
            "last_failure": one.last_failure,
            "cost_ns": one.cost_ns,
        }
        for one in lifecycle.listing()
    ]


def _run(options: argparse.Namespace, lifecycle: Lifecycle) -> int:
    from edge_client.answer import Failure
    from edge_client.client import EdgeClient
    from edge_client.commands import exits
    from edge_client.commands.loading import cut_for, find, spec_of
    from edge_client.planning.candidate import EDGE_ONLY

    here = options.split == EDGE_ONLY
    if not options.server and not here:
        raise SpecError('no server: give --server HOST:PORT, set ISTHMUS_SERVER, or say --split "edge-only"')
    items, spec = find(options.input), spec_of(options)
    known: dict[str, Any] = {"device": options.device, "threads": options.threads, "depth": options.depth}
    failed = 0
    client = EdgeClient(None if here else options.server, spec, metrics=False, lifecycle=lifecycle, **known)
    try:
        client.prepare()
        client.split = cut_for(client, options.split, items)
        for item, answer in zip(
            items, client.infer_many(items, prepare=spec.preprocess, failures="return"), strict=True
        ):
            if isinstance(answer, Failure):
                failed += 1
                print(f"edge-client: {printable(item.name)}: {one_line(str(answer.error))}", file=sys.stderr)
    finally:
        client.close()
    return exits.SOME_FAILED if failed else exits.OK


def _stages() -> str:
    rows = [[stage.value, stage.edge or "-", stage.cloud or "-", " ".join(stage.facts)] for stage in Stage]
    return table(["stage", "on the edge", "on the cloud", "the event has"], rows)
