"""``edge-client layers``: the layers of a model in execution order, and where it can be cut."""

from __future__ import annotations

import argparse

from edge_client.commands import exits
from edge_client.commands.loading import load
from edge_client.commands.output import check_json_target, table, write_json
from edge_client.text import size


def main(options: argparse.Namespace) -> int:
    """Print the table (and JSON); exit status."""
    check_json_target(options.json)
    loaded = load(options)
    with loaded.wrapped as wrapped:
        layers = list(wrapped.layers)
    splittable = sum(layer.can_split for layer in layers)
    if options.json:
        write_json(
            {
                "model": loaded.spec.model_id,
                "plan_digest": loaded.plan_digest,
                "can_split": splittable,
                "layers": [
                    {
                        "layer_id": layer.layer_id,
                        "name": layer.name,
                        "layer_type": layer.layer_type,
                        "output_bytes": layer.output_bytes,
                        "frontier_bytes": layer.frontier_bytes,
                        "can_split": layer.can_split,
                        "reason": layer.reason,
                    }
                    for layer in layers
                ],
            },
            options.json,
            options.stdout,
        )
    if options.json != "-":
        rows = [
            [
                str(layer.layer_id),
                layer.name,
                layer.layer_type,
                size(layer.output_bytes),
                size(layer.frontier_bytes),
                "yes" if layer.can_split else "no",
                layer.reason or "",
            ]
            for layer in layers
        ]
        headers = ["id", "name", "type", "output", "frontier", "can split", "reason"]
        print(table(headers, rows, right=(0, 3, 4)))
        print(f"\n{loaded.spec.model_id}: {len(layers)} layers, {splittable} cuts")
    return exits.OK
