"""``edge-client layers``: the layers of a model in execution order, and where it can be cut; or one cut explained."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from typing import Any

from edge_client.commands import common
from edge_client.commands.common import check_json_target, write_json
from edge_client.commands.feed import choice_of, cut_of, find, load
from edge_client.screen.text import printable
from edge_client.survey.loading import Loaded
from edge_client.tasks.layers import layers
from shared_hooks import LayerInfo
from shared_hooks.errors import CutRefused

NARROWEST = 40


def main(options: argparse.Namespace) -> int:
    """Print the table (and JSON); exit status."""
    check_json_target(options.json)
    if options.explain is not None:
        known, text, status = _explain(load(choice_of(options), options.input), options.explain, options.all)
        if options.json:
            write_json(known, options.json, options.stdout)
        if options.json != "-":
            print("\n".join(map(printable, text.splitlines())))
        return status
    found = layers(choice_of(options), find(options.input) if options.input else None)
    if options.json:
        write_json(
            {
                "model": found.model,
                "plan_digest": found.plan_digest,
                "can_split": len(found.cuts),
                "parameters": found.parameters,
                "weight_bytes": found.weight_bytes,
                "macs": found.macs,
                "layers": found.rows(),
            },
            options.json,
            options.stdout,
        )
    if options.json != "-":
        print(found.text())
    return common.OK


def _explain(loaded: Loaded, cut: str, everything: bool) -> tuple[dict[str, Any], str, int]:
    """What is known of ``cut``, for JSON and as text, and the exit status; of a refused one its neighbours."""
    with loaded.wrapped as wrapped:
        known_layers = wrapped.layers
        try:
            explanation = wrapped.explain(cut_of(cut, wrapped, "--explain"), *loaded.args, **loaded.kwargs)
        except CutRefused as error:
            reason = str(error).removeprefix(f"--explain {cut}: ")
            near = _nearest(known_layers, cut)
            text = f"{loaded.spec.model_id}: {reason}\nnearest cuts: {', '.join(near) or 'none'}"
            return {"model": loaded.spec.model_id, "refused": reason, "nearest": near}, text, common.SOME_FAILED
    known = {"model": loaded.spec.model_id, "plan_digest": loaded.plan_digest, **dataclasses.asdict(explanation)}
    return known, explanation.text(max(shutil.get_terminal_size().columns, NARROWEST), everything=everything), common.OK


def _nearest(layers: tuple[LayerInfo, ...], wanted: str) -> list[str]:
    """The names of the cuts next to one that is refused, before and after it."""
    number = next((one.layer_id for one in layers if wanted in (one.name, str(one.layer_id))), -1)
    before = next((one.name for one in reversed(layers[: max(number, 0)]) if one.can_split), None)
    after = next((one.name for one in layers[number + 1 :] if one.can_split), None)
    return [name for name in (before, after) if name is not None]
