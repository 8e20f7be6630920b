"""Put an open load on a server, and measure latency, throughput and goodput against the arrival rate."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from edge_client.benching.gang import LiveLane, LoadPlan, RecordedLane, SeveralProcesses, record
from edge_client.benching.generator import Alone, Gang
from edge_client.benching.load import codecs_of
from edge_client.benching.run import Benched, BenchTerms, measured
from edge_client.call import Call
from edge_client.credentials import Credentials
from edge_client.planning.codecs import LEARNT
from edge_client.process import local_server
from edge_client.settings import OWN, how_named
from edge_client.sweeping.settings import handed_over, inputs_that_come_with
from edge_client.tasks.subject import Model, Subject, address_of, subject_of
from edge_client.user_input import NamedInput
from edge_client.user_text import either, option
from shared_hooks.codecs import CODECS, check
from shared_hooks.errors import SpecError
from shared_hooks.options import takes


@takes(BenchTerms)
def bench(server: str | None, model: Model, inputs: Any = None, *, options: BenchTerms) -> Benched:
    """Measure a server under an open load (docs/bench.md): requests start on schedule, whether others were answered or
    not.

        found = edge_client.bench("cloud:50051", "digits", rate=[10, 20, 40], split="stage2=0.7,stage3=0.3")
        found.knee                # the highest rate of which 95 % were answered in time
        found.to_pandas()         # one row a rate
        Path("bench.html").write_text(found.page())

    ``server``, ``model``, ``inputs``: as for `sweep`. ``rate``: requests per second of all ``clients`` together, one or
    several in turn (10; a trace: its own), each for ``seconds`` (10; a trace: all of it) after ``warmup`` seconds that
    are not counted. ``arrivals``: "poisson", "constant", or a file of times in seconds. ``split`` and ``codec``: names
    with weights. ``deadline``: seconds within which an answer is goodput; ``give_up``: seconds after which a request is
    abandoned. ``exact``: False lets the server compute requests in batches. ``recorded``: run the heads once in
    advance, and send their frontiers repeatedly. ``processes``: number of sending processes.

    Ctrl-C or a lost server keeps what was measured: `Benched.ended`, `Benched.failure`. Raises SpecError for invalid
    options, UnknownLayer, CutRefused, and what connecting raises.
    """
    for word in options.codec.split(","):
        if ":" in word:
            check(word.partition("=")[0].strip())
    codecs = codecs_of(options.codec, options.clients, CODECS, LEARNT)
    address = address_of(server)
    if address is None:
        own = either("--server own", '"own"')
        raise SpecError(f"no server: {how_named()}; {own} starts one on this machine")
    subject = subject_of(model, handed_over(inputs), address, options.credentials)
    items = subject.inputs or inputs_that_come_with(subject.spec)
    credentials = options.credentials or Credentials()
    files = _files(subject, items, options.recorded, options.processes)
    by_name = options.processes > 1 and not options.recorded
    choice = subject.choice if by_name else subject.choice.with_spec(subject.spec)
    with ExitStack() as stack:
        if address == OWN:
            options.say("starting a server on this machine")
            address = stack.enter_context(local_server(subject.choice))
            credentials = Credentials()
        load = LoadPlan(
            address,
            choice,
            [one.word for one in options.cuts],
            codecs,
            [Call(*one.read(subject.spec)) for one in items],
            options.give_up,
            options.in_flight,
            options.patience,
            options.exact,
            credentials,
        )
        frontiers = record(load) if options.recorded else None
        gang: Gang = (
            SeveralProcesses(load, frontiers, files, options.processes)
            if options.processes > 1
            else Alone(
                LiveLane(load, at) if frontiers is None else RecordedLane(load, frontiers, at)
                for at in range(options.clients)
            )
        )
        stack.callback(gang.close)
        about = {"server": "own" if server == OWN else address, "torch": torch.__version__}
        return measured(options, gang, subject.spec.model_id, len(items), about, options.progress)


def _files(subject: Subject, items: Sequence[NamedInput], recorded: bool, processes: int) -> list[str]:
    """Return the inputs' files for other processes that run heads, if there are any. Raises SpecError."""
    if processes == 1 or recorded:
        return []
    given = option("processes", processes)
    if not subject.by_name:
        raise SpecError(f"{given}: a model in memory reaches no other process; name it, or {option('recorded')}")
    made = [one for one in items if one.item is None and not one.made]
    if made:
        raise SpecError(f"{given}: an input in memory reaches no other process; give files, or {option('recorded')}")
    return [one.origin for one in items if one.item is not None]
