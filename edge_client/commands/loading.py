"""The model's choice from the command line; what `edge_client.survey.loading` makes of words."""

from __future__ import annotations

import argparse

from edge_client.model_choice import ModelChoice
from edge_client.survey.loading import cut_for as cut_for
from edge_client.survey.loading import cut_of as cut_of
from edge_client.survey.loading import example_of as example_of
from edge_client.survey.loading import find as find
from edge_client.survey.loading import first_readable as first_readable
from edge_client.survey.loading import load as load


def choice_of(options: argparse.Namespace) -> ModelChoice:
    """What --model, --weights, --selection, --example, --depth, --device, --threads and --only-head say."""

    return ModelChoice(
        options.model,
        weights=tuple(options.weights or ()),
        selection=options.selection,
        example=options.example,
        depth=options.depth,
        device=options.device,
        threads=options.threads,
        only_head=getattr(options, "only_head", None),  # of run
    )
