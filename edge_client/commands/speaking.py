"""What ``edge-client generate`` and ``edge-client chat`` share: the model, how it writes, and what is reported."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from edge_client.client import EdgeClient
from edge_client.commands.common import credentials_of, needed, running
from edge_client.commands.feed import choice_of
from edge_client.commands.hooks import configured
from edge_client.generation import SplitGenerator, Summary, Words
from edge_client.screen.text import printable
from edge_client.spoken import AUTO
from edge_client.transport import ConnectionOptions
from shared_hooks.errors import SpecError
from shared_hooks.showing import size

LEAST = ("least",)
"""In place of a number of logits: as few as are needed."""
SAMPLING = ("temperature", "top_k", "top_p", "seed")
"""Options that mean nothing where nothing is drawn."""


@contextmanager
def speaker(options: argparse.Namespace) -> Iterator[tuple[SplitGenerator, Words]]:
    """The model of the options, cut and connected, and its tokenizer. Raises what commands tell."""
    how(options)  # before anything is loaded
    server = needed(options)
    choice = choice_of(options)
    spec = choice.spec()
    with running(server, choice) as address:
        client = EdgeClient(
            address,
            choice.with_spec(spec),
            metrics=False,
            deadline=options.deadline,
            lifecycle=configured(options.config, options.log_level, options.log_format),
            connection=ConnectionOptions(patience=options.patience, credentials=credentials_of(options)),
        )
        try:
            generator = SplitGenerator(client, options.cut, answer=LEAST, codec=options.codec)
            if options.cut == AUTO:
                tell(f"cut after {generator.cut}: a token is there soonest")
            words = Words.of(spec)
            client.open()
            if client.loaded is not None:
                tell(f"{client.loaded} (--only-head {options.only_head})")
            with generator:
                yield generator, words
        finally:
            client.close()


def how(options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of ``generate()``. Raises SpecError for what does not go together."""
    if not options.sample and (given := [name for name in SAMPLING if getattr(options, name) is not None]):
        raise SpecError(f"--{given[0].replace('_', '-')} is for --sample: else the likeliest token is taken")
    found: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "do_sample": options.sample}
    for name in SAMPLING[:-1]:
        if (value := getattr(options, name)) is not None:
            found[name] = value
    if options.lookup is not None:
        found["prompt_lookup_num_tokens"] = options.lookup
    return found


def draw(options: argparse.Namespace) -> None:
    """From here on chance is that of --seed."""
    if options.seed is not None:
        torch.manual_seed(options.seed)


def tell(text: str) -> None:
    """A line about what was written, beside it."""
    console = Console(stderr=True, highlight=False)
    console.print(Text(printable(text), style="dim" if console.is_terminal else ""), soft_wrap=not console.is_terminal)


def figures(summary: Summary) -> str:
    """A summary, and what a token takes of the link."""
    up, down = summary.bytes_up_per_token, summary.bytes_down_per_token
    each = "" if up is None else f" ({size(up)} and {size(down)} a token)"
    return f"{summary.line}{each}"
