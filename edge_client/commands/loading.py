"""The model's choice from the command line; what `edge_client.survey.loading` makes of words."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import Any

from edge_client.commands.credentials import credentials_of
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


def keywords(options: argparse.Namespace, task: Callable[..., Any], *but: str) -> dict[str, Any]:
    """What a command passes on to its task: an option and the task's keyword of the same name are one. ``but``: those
    that the command gives itself.
    """
    found: dict[str, Any] = {}
    for name, keyword in inspect.signature(task).parameters.items():
        if keyword.kind is not keyword.KEYWORD_ONLY or name in but:
            continue
        if name == "progress" and hasattr(options, "no_progress"):
            found[name] = not options.no_progress
        elif name == "credentials" and hasattr(options, "token_file"):
            found[name] = credentials_of(options)
        elif name == "failures":
            found[name] = "raise" if options.debug else "return"
        elif hasattr(options, name):
            found[name] = getattr(options, name)
    return found
