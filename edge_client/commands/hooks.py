"""Implement ``edge-client hooks``: list the life cycle's hooks, stage by stage, in their order; with inputs, their
cost.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edge_client.answer import Failure
from edge_client.client import EdgeClient
from edge_client.commands import common
from edge_client.commands.common import check_json_target, credentials_of, needed, running, say, write_json
from edge_client.commands.feed import choice_of, cut_for, find
from edge_client.commands.report import table
from edge_client.model_choice import ModelChoice
from edge_client.screen import one_line, printable
from edge_client.settings import NONE
from edge_client.tracing import Traces
from edge_client.transport import ConnectionOptions
from edge_client.user_text import EDGE_ONLY
from shared_hooks.config import Table
from shared_hooks.errors import SpecError
from shared_hooks.lifecycle import Lifecycle, Stage
from shared_hooks.lifecycle.log import show
from shared_hooks.lifecycle.registry import lines, read
from shared_hooks.tracing import endpoint_of, exporting


def main(options: argparse.Namespace) -> int:
    """List them, after running the inputs if there are any; return the exit status."""
    check_json_target(options.json)
    if options.stages:
        print(_stages())
        return common.OK
    if options.split is not None and not options.input:
        raise SpecError(f"--split {options.split}: nothing is run without --input")
    lifecycle = configured(options.config, options.log_level, options.log_format)
    status = common.OK
    if options.input:
        status = _run(choice_of(options), options.input, options, lifecycle)
    print("\n".join(lines(lifecycle)))
    received = {one.stage for one in lifecycle.listing()}
    silent = [stage.value for stage in Stage if stage.edge and stage not in received]
    width = shutil.get_terminal_size().columns
    print("\n" + textwrap.fill(f"no process listens at {', '.join(silent)}", width, break_long_words=False))
    if options.json:
        write_json({"hooks": as_dicts(lifecycle)}, options.json, options.stdout)
    return status


def configured(config: str | None, log_level: str | None, log_format: str) -> Lifecycle:
    """Return the hooks of ``--config``, of installed packages, and the default one, which logs as ``--log-level`` says;
    and traces, if ``--config`` or the environment names a collector.
    """
    if log_level:
        show(log_level, log_format)
    file = Path(config) if config else None
    lifecycle = read("edge", file, beside=["client", "tracing"])
    tracing = Table.read(file).table("tracing") if file else None
    export = exporting("isthmus-edge", "" if tracing is None else endpoint_of(tracing))
    if export is not None:  # it sends what is left when the process ends
        lifecycle.register(Traces(export.provider))
    return lifecycle


def as_dicts(lifecycle: Lifecycle) -> list[dict[str, Any]]:
    """Return the listing as JSON data; cost in nanoseconds."""
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


def _run(choice: ModelChoice, inputs: Sequence[str], options: argparse.Namespace, lifecycle: Lifecycle) -> int:
    if options.split is None and options.server not in (None, NONE):
        raise SpecError(f"--server {options.server}: say where to cut, too: --split LAYER, or cloud-only")
    split = options.split or EDGE_ONLY
    server = None if split == EDGE_ONLY else needed(options)
    with running(server, choice) as address:
        return _send(choice, inputs, options, lifecycle, address, split)


def _send(
    choice: ModelChoice,
    inputs: Sequence[str],
    options: argparse.Namespace,
    lifecycle: Lifecycle,
    server: str | None,
    split: str,
) -> int:
    items, spec, failed = find(inputs), choice.spec(), 0
    client = EdgeClient(
        server,
        choice.with_spec(spec),
        metrics=False,
        lifecycle=lifecycle,
        connection=ConnectionOptions(credentials=credentials_of(options)),
    )
    try:
        client.prepare()
        client.split = cut_for(client, split, items)
        for item, answer in zip(
            items, client.infer_many(items, prepare=spec.preprocess, failures="return"), strict=True
        ):
            if isinstance(answer, Failure):
                failed += 1
                say(f"{printable(item.name)}: {one_line(str(answer.error))}")
    finally:
        client.close()
    return common.SOME_FAILED if failed else common.OK


def _stages() -> str:
    width = shutil.get_terminal_size().columns
    rows = [[stage.value, stage.edge or "-", stage.cloud or "-", " ".join(stage.facts)] for stage in Stage]
    wide = table(["stage", "on the edge", "on the cloud", "the event has"], rows)
    if not sys.stdout.isatty() or len(wide.partition("\n")[0]) <= width:
        return wide
    return "\n".join(_narrow(*row) for row in rows)


def _narrow(stage: str, edge: str, cloud: str, facts: str) -> str:
    """Format one stage below the other, for a terminal too narrow for the table."""
    return f"{stage}\n  edge:  {edge}\n  cloud: {cloud}\n  has:   {facts or '-'}"
