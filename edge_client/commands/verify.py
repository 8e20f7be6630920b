"""``edge-client verify``: every cut of a model against the whole model."""

from __future__ import annotations

import argparse

from edge_client.commands import exits
from edge_client.commands.loading import choice_of, load
from edge_client.commands.output import check_json_target, table, write_json
from edge_client.screen.progress import progress


def main(options: argparse.Namespace) -> int:
    """Print the verdict (and JSON); status 1 unless every cut is exact or refused."""
    check_json_target(options.json)
    loaded = load(choice_of(options), options.input)
    with loaded.wrapped as wrapped, progress("cuts", len(wrapped.layers) + 1, not options.no_progress) as advance:
        report = wrapped.verify(*loaded.args, on_cut=lambda done, total: advance(""), **loaded.kwargs)
    if options.json != "-":
        bad = [(layer, "refused", layer.reason or "") for layer in report.refused]
        bad += [(layer, "DIFFERS", "the tail's output is not the whole model's") for layer in report.differing]
        if bad:
            rows = [[str(layer.layer_id), layer.name, layer.layer_type, what, why] for layer, what, why in bad]
            print(table(["id", "name", "type", "cut", "reason"], rows, right=(0,)))
            print()
        if not report.input_exact:
            print('the cut at "input" DIFFERS')
        print(
            f"{loaded.spec.model_id}: {len(report.exact)} cuts exact, {len(report.refused)} refused, "
            f"{len(report.differing)} differing: {'ok' if report.ok else 'NOT OK'}"
        )
    if options.json:
        write_json(
            {"model": loaded.spec.model_id, "plan_digest": loaded.plan_digest, **report.as_dict()},
            options.json,
            options.stdout,
        )
    return exits.OK if report.ok else exits.SOME_FAILED
