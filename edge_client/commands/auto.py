"""Implement ``edge-client run --split auto``: its options and its log."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from edge_client import user_text
from edge_client.adaptive import AutoClient, AutoOptions
from edge_client.adaptive.beginning import begin
from edge_client.call import Call
from edge_client.client import EdgeClient
from edge_client.commands.common import power_of, say
from edge_client.commands.feed import first_readable
from edge_client.planning.codecs import named
from edge_client.planning.leakage import bound_of
from edge_client.planning.objective import Constraints
from edge_client.sources import Item
from shared_hooks.errors import SpecError
from shared_hooks.models import InputItem

# The constraints of ``plan`` and ``run --split auto``, from the command line.


def constraints_of(options: argparse.Namespace) -> Constraints:
    """Return the constraints. Raises SpecError for an invalid size."""
    memory, traffic = options.max_edge_memory, options.max_bytes_per_second
    codec = options.codec if options.leakage is None else named(options.codec)  # as tables name it
    return Constraints(
        user_text.size("--max-edge-memory", memory) if memory else None,
        user_text.size("--max-bytes-per-second", traffic) if traffic else None,
        options.rate,
        options.min_accuracy,
        bound_of(options.max_leakage, options.leakage, codec),
    )


@dataclass(frozen=True)
class Choosing:
    """How the cut is chosen, and the file for every decision."""

    options: AutoOptions
    log: str | None


def choosing_of(options: argparse.Namespace) -> Choosing:
    """Read the options. Raises SpecError for invalid ones, before anything is loaded."""
    return Choosing(
        AutoOptions(
            objective=options.objective,
            constraints=constraints_of(options),
            partitioner=options.partitioner,
            option=options.partitioner_option,
            power=power_of(options),
            edge_profile=options.edge_profile,
            cloud_profile=options.cloud_profile,
            profile_seconds=options.profile_seconds,
            progress=not options.no_progress,
            say=say,
        ),
        options.log_decisions,
    )


@contextmanager
def auto_client(chooses: Choosing, client: EdgeClient, items: Sequence[Item]) -> Iterator[AutoClient]:
    """Return a client that chooses; ``client`` is prepared. Closes what it started, not the client."""
    spec = client.spec
    assert spec is not None
    item = first_readable(spec, items)
    call = Call(*(spec.example() or spec.preprocess(item)))
    with ExitStack() as stack:
        options = replace(chooses.options, on_decision=_writer(chooses.log, stack))
        file = item.path if isinstance(item, InputItem) else None
        yield stack.enter_context(closing(begin(client, options, call, prepare=spec.preprocess, file=file)))


def _writer(target: str | None, stack: ExitStack) -> Callable[[dict[str, Any]], None] | None:
    """Return a writer of JSON lines, flushed at once; a full disk ends the log, not the run."""
    if target is None:
        return None
    try:
        file = stack.enter_context(open(target, "wb", buffering=0))  # noqa: SIM115
    except OSError as error:
        raise SpecError(f"--log-decisions: {target} cannot be written: {error.strerror}") from error

    def write(entry: dict[str, Any]) -> None:
        try:
            if not file.closed:
                file.write(json.dumps(entry).encode() + b"\n")
        except OSError as error:
            file.close()
            say(f"--log-decisions: {target} cannot be written any more: {error.strerror}")

    return write


def log_moves(debug: bool) -> None:
    """Log moves and events to standard error (every choice with ``debug``)."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("edge-client: auto: %(message)s"))
    logger = logging.getLogger("edge_client.adaptive")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
