"""``edge-client run --split auto``: what it goes by from the words of the command line, and what it tells."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from edge_client import units
from edge_client.adaptive import AutoClient, AutoOptions
from edge_client.adaptive.beginning import begin
from edge_client.call import Call
from edge_client.client import EdgeClient
from edge_client.commands.feed import first_readable
from edge_client.commands.report import say
from edge_client.planning.objective import Constraints
from edge_client.sources import Item
from shared_hooks.errors import SpecError
from shared_hooks.models import InputItem

if TYPE_CHECKING:
    from edge_client.adaptive import AutoClient
    from edge_client.live import Dashboard, ToSinks
    from shared_hooks.sinks import Sink


# ``--dashboard`` and ``--sink`` of a run: what looks on while it goes.


class Looking:
    """The observers of one command; `close` it after the client. Raises SpecError for a sink that cannot be had."""

    def __init__(self, sinks: Sequence[str], listen: str | None) -> None:
        """``listen``: of the page, [HOST:]PORT; None = no page."""
        self._listen = listen
        self._page: Dashboard | None = None
        self._to_sinks: ToSinks | None = None
        self._opened: list[Sink] = []
        if sinks:
            from shared_hooks.sinks import open_sink

            try:
                for text in sinks:
                    self._opened.append(open_sink(text))
            except BaseException:
                self.close()
                raise

    @property
    def wanted(self) -> bool:
        """Whether anything looks on: then layers are measured."""
        return self._listen is not None or bool(self._opened)

    def begin(self, client: EdgeClient) -> None:
        """The page, from now on."""
        if self._listen is not None:
            from edge_client.live import Dashboard

            self._page = Dashboard(client, self._listen)
            print(f"edge-client: dashboard at {self._page.url}", file=sys.stderr, flush=True)

    def count(self, client: EdgeClient) -> None:
        """The sinks, from now on: what was before warmed up."""
        if self._opened:
            from edge_client.live import ToSinks

            self._to_sinks = ToSinks(*self._opened)
            client.lifecycle.register(self._to_sinks)

    def follow(self, chooser: AutoClient) -> None:
        """What decides where requests run."""
        if self._page is not None:
            self._page.follow(chooser)

    def close(self) -> None:
        """Sinks have all of it when this returns."""
        if self._page is not None:
            self._page.close()
        if self._to_sinks is None:
            for sink in self._opened:
                sink.close()
            return
        self._to_sinks.close()
        if number := self._to_sinks.left_out:
            print(f"edge-client: --sink: {number} answers were left out, for a sink was too slow", file=sys.stderr)
        if number := self._to_sinks.failures:
            print(f"edge-client: --sink: {number} answers could not be written", file=sys.stderr)


# What ``plan`` and ``run --split auto`` may not exceed, from the words of the command line.


def constraints_of(options: argparse.Namespace) -> Constraints:
    """Raises SpecError for a size that is none."""
    memory, traffic = options.max_edge_memory, options.max_bytes_per_second
    return Constraints(
        units.size("--max-edge-memory", memory) if memory else None,
        units.size("--max-bytes-per-second", traffic) if traffic else None,
        options.rate,
        options.min_accuracy,
    )


@dataclass(frozen=True)
class Choosing:
    """By what the cut is chosen, and the file for every decision."""

    options: AutoOptions
    log: str | None


def choosing_of(options: argparse.Namespace) -> Choosing:
    """SpecError for words that cannot be used, before anything is loaded."""
    return Choosing(
        AutoOptions(
            objective=options.objective,
            constraints=constraints_of(options),
            partitioner=options.partitioner,
            option=options.partitioner_option,
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
    """A client that chooses; ``client`` is prepared. Ends what it started, not the client."""
    spec = client.spec
    assert spec is not None
    item = first_readable(spec, items)
    call = Call(*(spec.example() or spec.preprocess(item)))
    with ExitStack() as stack:
        options = replace(chooses.options, on_decision=_writer(chooses.log, stack))
        file = item.path if isinstance(item, InputItem) else None
        yield stack.enter_context(closing(begin(client, options, call, prepare=spec.preprocess, file=file)))


def _writer(target: str | None, stack: ExitStack) -> Callable[[dict[str, Any]], None] | None:
    """To a file, one line of JSON for each, as soon as it is known; a disk that fills up ends the log, not the run."""
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
    """Moves and events on standard error (every choice with ``debug``)."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("edge-client: auto: %(message)s"))
    logger = logging.getLogger("edge_client.adaptive")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
