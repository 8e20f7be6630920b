"""The beginnings of ``edge-client run --split auto``: profiles, link, controller; and a client that uses them."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from edge_client.adaptive import AutoClient
from edge_client.adaptive.controller import SplitController
from edge_client.adaptive.monitor import Check, Connect
from edge_client.client import EdgeClient
from edge_client.commands.constraints import constraints_of
from edge_client.commands.credentials import credentials_of
from edge_client.commands.loading import first_readable
from edge_client.load import Load
from edge_client.planning.link import Link
from edge_client.planning.objective import Constraints, Objective
from edge_client.planning.partitioners import ByObjective, Partitioner, find_partitioner
from edge_client.planning.predict import predict
from edge_client.screen.text import one_line
from edge_client.sources import Item
from edge_client.survey.gather import Gathered, Wanted, edge_profile, gather, probe_sizes
from edge_client.survey.loaded import Loaded
from edge_client.survey.prober import LinkProber
from edge_client.survey.probing import fetch_profile, probe
from shared_hooks.errors import ServerUnavailable, SpecError
from shared_hooks.models import InputItem
from shared_hooks.models.example import to_device
from shared_hooks.profiling import profile_file
from shared_hooks.profiling.profile import Profile

FIRST_CALL_SECONDS: Final = 5.0
"""For the server to be there at the start; without it everything runs here until it comes."""


@dataclass(frozen=True)
class Choosing:
    """By what the cut is chosen, and what is known beforehand."""

    wanted: Wanted
    objective: Objective
    constraints: Constraints
    partitioner: Partitioner
    partitioner_option: str | None
    log: str | None
    """A file for every decision."""
    patience: float
    progress: bool

    def through(self, server: str | None) -> Choosing:
        """The same with this server."""
        return replace(self, wanted=replace(self.wanted, server=server))


def choosing_of(options: argparse.Namespace) -> Choosing:
    """SpecError for words that cannot be used, before anything is loaded."""
    objective, partitioner = Objective.parse(options.objective), find_partitioner(options.partitioner)
    if isinstance(partitioner, ByObjective):
        objective = partitioner.own or objective
    return Choosing(
        Wanted(
            server=options.server,
            credentials=credentials_of(options),
            edge_profile=options.edge_profile,
            cloud_profile=options.cloud_profile,
            seconds=options.profile_seconds,
            codec=options.codec,
        ),
        objective,
        constraints_of(options),
        partitioner,
        options.partitioner_option,
        options.log_decisions,
        options.patience,
        not options.no_progress,
    )


@contextmanager
def auto_client(chooses: Choosing, client: EdgeClient, items: Sequence[Item]) -> Iterator[AutoClient]:
    """A client that chooses; ``client`` is prepared. Ends what it started, not the client."""

    assert client.spec is not None
    item = first_readable(client.spec, items)
    loaded, wanted = _loaded(client, item), replace(chooses.wanted, file=_file(item))
    with ExitStack() as stack:
        write = _writer(chooses.log, stack)
        gathered = _gather(loaded, wanted, chooses)
        controller = _controller(chooses, gathered)
        connect = None
        if isinstance(gathered, Gathered):
            client.open()
        else:
            connect = _connector(loaded, wanted, gathered)
        auto = AutoClient(
            client,
            controller,
            prepare=loaded.spec.preprocess,
            local=_fits(chooses.constraints, gathered.edge if isinstance(gathered, Gathered) else gathered),
            connect=connect,
            on_decision=write,
        )
        yield stack.enter_context(auto)


def _file(item: Item) -> str | None:
    return str(item.path) if isinstance(item, InputItem) else None


def _loaded(client: EdgeClient, item: Item) -> Loaded:
    """The client's own model, planned on the spec's example, or on ``item``."""
    assert client.spec is not None
    args, kwargs = client.spec.example() or client.spec.preprocess(item)
    args, kwargs = to_device(args, client.device), to_device(kwargs, client.device)
    return Loaded(client.choice, client.spec, client.wrapped, args, kwargs, client.wrapped.plan(*args, **kwargs).digest)


def _gather(loaded: Loaded, wanted: Wanted, chooses: Choosing) -> Gathered | Profile:
    """Everything; only this side's profile where no server answers."""
    assert wanted.server is not None
    try:
        with LinkProber(wanted.server, credentials=wanted.credentials) as prober:
            prober.round(0, 0, min(FIRST_CALL_SECONDS, chooses.patience))
        with gather(loaded, wanted, _say, chooses.progress) as gathered:
            return gathered
    except ServerUnavailable as error:
        _say(f"no server yet, everything runs here: {error}")
    return edge_profile(loaded, wanted, _say, chooses.progress)


def _connector(loaded: Loaded, wanted: Wanted, edge: Profile) -> Connect:
    """What the watch does when the server is there for the first time."""

    def connect(check: Check) -> tuple[Profile, Link, Load]:

        def on_progress(done: int, total: int, what: str) -> None:
            check()

        server = wanted.server
        assert server is not None
        known = loaded.spec.model_id, wanted.warmup, wanted.repetitions, wanted.seconds
        how: dict[str, Any] = {"patience": FIRST_CALL_SECONDS, "credentials": wanted.credentials}
        data = fetch_profile(server, *known, on_progress, **how)
        cloud = profile_file.from_json(data, "cloud", f"the profile that {server} sent")
        profile_file.check(cloud, edge.model)
        sizes, answers = probe_sizes(edge, None), (0, cloud.answer_bytes)
        link, load = probe(server, sizes, answers, wanted.probe_seconds, on_progress, **how)
        return cloud, link, load

    return connect


def _controller(chooses: Choosing, found: Gathered | Profile) -> SplitController:

    partitioner = chooses.partitioner
    moves = isinstance(partitioner, ByObjective)  # the controller itself decides so, and moves with care
    make = partial(
        SplitController,
        objective=chooses.objective,
        constraints=chooses.constraints,
        partitioner=None if moves else partitioner,
        option=chooses.partitioner_option,
    )
    if not isinstance(found, Gathered):
        return make(found)
    return make(found.edge, found.cloud, found.link, found.load, file=found.file, file_crosses=found.file_crosses)


def _fits(constraints: Constraints, edge: Profile) -> bool:
    """Whether the whole model may run here."""

    alone = predict(edge, None, None)[0]
    return constraints.violated(alone) is None


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
            _say(f"--log-decisions: {target} cannot be written any more: {error.strerror}")

    return write


def _say(text: str) -> None:
    print(f"edge-client: {one_line(text)}", file=sys.stderr, flush=True)


def log_moves(debug: bool) -> None:
    """Moves and events on standard error (every choice with ``debug``)."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("edge-client: auto: %(message)s"))
    logger = logging.getLogger("edge_client.adaptive")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
