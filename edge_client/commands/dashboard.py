"""Implement ``edge-client dashboard``: a page in the browser, and requests to show; or only a server's state."""

from __future__ import annotations

import argparse
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Final

from edge_client.adaptive import AutoClient
from edge_client.answer import Failure
from edge_client.client import EdgeClient
from edge_client.commands import auto, common
from edge_client.commands.common import Looking, credentials_of, needed, running, say
from edge_client.commands.feed import choice_of, cut_for, find
from edge_client.commands.hooks import configured
from edge_client.core import CONNECTION_ERRORS
from edge_client.live import Dashboard
from edge_client.screen import one_line, printable
from edge_client.transport import ConnectionOptions
from edge_client.user_text import EDGE_ONLY
from shared_hooks.errors import IsthmusError, SpecError
from shared_hooks.models import InputItem, ModelSpec

AUTO: Final = "auto"


def main(options: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C, or until ``--repeat`` rounds are over; return the exit status."""
    if not options.input:
        return _watch_only(options)
    here = options.split == EDGE_ONLY
    items = find(options.input)
    server = None if here else needed(options)
    if options.split == AUTO:
        auto.choosing_of(options)  # rejects wrong arguments before anything is loaded
    with running(server, choice_of(options), options.observers) as address:
        return _work(options, address, items)


def _watch_only(options: argparse.Namespace) -> int:
    """Show the link to a server and its load; without a model or requests."""
    for name in ("split", "sinks", "observers"):
        if getattr(options, name) not in (None, [], (), AUTO):
            raise SpecError(f"--{name.rstrip('s').replace('observer', 'observe')}: nothing is run without --input")
    server = needed(options)
    with (
        running(server, choice_of(options)) as address,
        Dashboard(address or "", options.listen, credentials=credentials_of(options)) as page,
    ):
        say(f"dashboard at {page.url} (no --input: the server is only watched)")
        threading.Event().wait()
    return common.OK


def _work(options: argparse.Namespace, server: str | None, items: Sequence[InputItem]) -> int:
    choice = choice_of(options)
    spec = choice.spec()
    common.check_effects(options)
    with closing(Looking(options.sinks, options.listen)) as looking:
        client = EdgeClient(
            server,
            choice.with_spec(spec),
            codec=options.codec,
            calibration=options.calibration,
            max_loss=options.max_loss,
            deadline=options.deadline,
            observers=options.observers,
            lifecycle=configured(options.config, options.log_level, options.log_format),
            connection=ConnectionOptions(
                patience=options.patience, max_in_flight=1, credentials=credentials_of(options)
            ),
        )
        try:
            looking.begin(client)
            looking.count(client)
            client.prepare()
            if options.split == AUTO:
                with auto.auto_client(auto.choosing_of(options), client, items) as chooser:
                    looking.follow(chooser)
                    failed = _send(chooser, spec, items, options)
            else:
                client.split = cut_for(client, options.split, items)
                failed = _send(client, spec, items, options)
        finally:
            client.close()
    return common.SOME_FAILED if failed else common.OK


def _send(
    client: EdgeClient | AutoClient, spec: ModelSpec, items: Sequence[InputItem], options: argparse.Namespace
) -> int:
    """Send one request after the other, and return how many failed. A lost server ends nothing, as it may come back."""
    failed = 0
    complaint = ""
    for item in _rounds(items, options.repeat):
        began = time.monotonic()
        try:
            (answer,) = client.infer_many([item], prepare=spec.preprocess, failures="return")
            error: Exception | None = answer.error if isinstance(answer, Failure) else None
        except CONNECTION_ERRORS as caught:
            error = caught
        if error is not None:
            failed += 1
            if not isinstance(error, IsthmusError):
                raise error
            if (kind := type(error).__name__) != complaint:  # once per kind of error; the page has them all
                say(f"{printable(item.name)}: {one_line(f'{kind}: {error}')}")
        complaint = "" if error is None else type(error).__name__
        time.sleep(max(0.0, options.every - (time.monotonic() - began)))
    return failed


def _rounds(items: Sequence[InputItem], rounds: int | None) -> Iterator[InputItem]:
    return itertools.chain.from_iterable(itertools.repeat(items) if rounds is None else itertools.repeat(items, rounds))
