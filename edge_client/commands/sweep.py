"""``edge-client sweep``: real inputs through every cut, in tables and on a page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from edge_client.commands import exits
from edge_client.commands.output import check_json_target, table, write_json
from edge_client.progress import progress
from edge_client.sweep import extras
from edge_client.text import milliseconds, one_line, printable, size
from shared_hooks.errors import HookRefused, IsthmusError

if TYPE_CHECKING:
    from edge_client.loaded import Loaded
    from edge_client.planning.objective import Objective
    from edge_client.sweep.feed import Feed
    from edge_client.sweep.journal import Journal
    from edge_client.sweep.ways import Way


def main(options: argparse.Namespace) -> int:
    """Measure what is not measured yet, write the results; exit status."""
    extras.check()
    check_json_target(options.json)
    from edge_client.commands.loading import spec_of
    from edge_client.dial import check_address
    from edge_client.planning.objective import Objective
    from edge_client.sweep.feed import feeds_of
    from edge_client.sweep.journal import open_journal
    from edge_client.sweep.settings import settings_of
    from edge_client.sweep.ways import choose, ways_of
    from shared_hooks.observers import named

    if options.server:
        check_address(options.server)
    objective = Objective.parse(options.objective)
    options.hooks = named.check(options.hooks)
    spec = spec_of(options)
    if "tokens" in options.hooks:
        spec.load_tokenizer()  # a wrong one is told before hours of work
    feeds = feeds_of(spec, options.input)
    with open_journal(options.out) as journal, ExitStack() as stack:
        loaded = _load(options, feeds)
        stack.callback(loaded.wrapped.detach)
        cuts = choose(loaded.wrapped.layers, options.cuts, options.every)
        ways = ways_of(cuts, files=all(feed.item for feed in feeds), local=options.local)
        settings = settings_of(options, loaded, feeds, ways)
        contents = journal.begin(settings, options.fresh)
        done = frozenset(contents.done)
        ended, status = None, exits.OK
        if len(done) == len(feeds):
            _say(f"{journal.folder}: all {len(done)} inputs are measured already; --fresh measures them again")
        else:
            if done:
                _say(f"{journal.folder}: going on after {len(done)} of {len(feeds)} inputs")
            try:
                ended, status = _measure(options, loaded, feeds, ways, journal, done, objective, stack)
            except KeyboardInterrupt:
                ended, status = "interrupted", exits.INTERRUPTED
        return _finish(options, journal, ways, ended, status, objective)


def _load(options: argparse.Namespace, feeds: Sequence[Feed]) -> Loaded:
    """Planned on the spec's example; without one, on the first input that can be."""
    from edge_client.commands.loading import load, spec_of

    if spec_of(options).example() is not None:
        return load(argparse.Namespace(**{**vars(options), "input": None}))
    problem: IsthmusError | None = None
    for feed in feeds:
        assert feed.item is not None  # without an example there are files
        try:
            return load(argparse.Namespace(**{**vars(options), "input": [str(feed.item.path)]}))
        except IsthmusError as error:
            problem = error
    assert problem is not None
    raise problem


def _measure(
    options: argparse.Namespace,
    loaded: Loaded,
    feeds: Sequence[Feed],
    ways: Sequence[Way],
    journal: Journal,
    done: frozenset[int],
    objective: Objective,
    stack: ExitStack,
) -> tuple[str | None, int]:
    """Why it ended early (None: it did not), and the exit status."""
    from edge_client.client import CONNECTION_ERRORS, EdgeClient
    from edge_client.sweep.measure import Meter
    from edge_client.sweep.runner import Run

    server = _server(options, loaded, feeds, journal, objective, stack)
    loaded.wrapped.detach()
    client = EdgeClient(
        server,
        loaded.spec,
        device=options.device,
        threads=options.threads,
        depth=options.depth,
        codec=options.codec,
        deadline=options.deadline,
        patience=options.patience,
        max_in_flight=1,
    )
    stack.callback(client.close)
    rounds = options.repetitions + min(options.repetitions, options.layer_repetitions)
    left = len(feeds) - len(done)
    steps = len(ways) * (1 + left * rounds) + (1 + left if options.hooks else 0)
    try:
        client.open()
        with progress("sweep", steps, not options.no_progress) as on_step:
            run = Run(
                Meter(client, loaded.spec, options.codec),
                feeds,
                ways,
                options.repetitions,
                options.warmup,
                journal,
                on_step,
                options.seconds,
                layer_repetitions=options.layer_repetitions,
                hooks=options.hooks,
            )
            run.run(done)
    except HookRefused as error:
        if options.debug:
            raise
        return f"--hooks: {one_line(str(error))}", exits.USAGE
    except CONNECTION_ERRORS as error:
        if options.debug:
            raise
        _complain(f"{type(error).__name__}: {error}")
        return one_line(f"{type(error).__name__}: {error}"), exits.CONNECTION
    return (f"the budget of {options.seconds:g} s was used up" if run.over else None), exits.OK


def _server(
    options: argparse.Namespace,
    loaded: Loaded,
    feeds: Sequence[Feed],
    journal: Journal,
    objective: Objective,
    stack: ExitStack,
) -> str:
    """The server's address; one of our own is started where none is given. Before that, what the plan says: into the
    journal, unless it is there. A sweep without a prediction is a sweep still.
    """
    from edge_client.commands.loading import first_readable
    from edge_client.local_server import local_server
    from edge_client.planning.gather import Wanted, gather
    from edge_client.sweep.foretell import foretell

    if options.predict and journal.read().prediction is None:
        files = [feed.item for feed in feeds if feed.item is not None]
        file = first_readable(loaded.spec, files) if files else None
        wanted = Wanted(
            server=options.server,
            file=str(file.path) if file is not None else None,
            repetitions=options.profile_repetitions,
            seconds=options.profile_seconds,
            codec=options.codec,
            calibrate=options.calibrate,
            model=options.model,
            weights=options.weights,
            depth=options.depth,
            device=options.device,
            threads=options.threads,
            hooks=options.hooks,
        )
        try:
            gathered = stack.enter_context(gather(loaded, wanted, _say, not options.no_progress))
            journal.write({"prediction": foretell(gathered, objective)})
            if gathered.server is not None:
                return gathered.server
        except Exception as error:  # whatever it is: measured numbers need no prediction
            if options.debug:
                raise
            _complain(f"no prediction: {type(error).__name__}: {error}")
    if options.server:
        return str(options.server)
    own = local_server(
        options.model,
        weights=options.weights or (),
        selection=loaded.spec.selection,
        depth=options.depth,
        device=options.device,
        threads=options.threads,
        hooks=options.hooks,
    )
    return stack.enter_context(own)


def _finish(
    options: argparse.Namespace,
    journal: Journal,
    ways: Sequence[Way],
    ended: str | None,
    status: int,
    objective: Objective,
) -> int:
    """Write tables, summary and page of what the journal holds; tell; exit status."""
    from edge_client.sweep.results import write

    done = len(journal.read().done)
    if not done:
        _complain(f"nothing was measured{f': {ended}' if ended else ''}; the same command tries again")
        return status
    known = write(journal, ways, ended, objective)
    failed = sum(one["failed"] for one in known["ways"])
    if status == exits.OK and failed:
        status = exits.SOME_FAILED
    _say(text(known))
    _say(f"report: {journal.folder / 'report.html'}")
    if ended is not None:
        inputs = f"{done} of {len(known['settings']['inputs'])} inputs are measured"
        _complain(f"{ended}: {inputs}; the same command goes on where it stopped")
    if options.json:
        write_json({**known, "exit_status": status}, options.json, options.stdout)
    return status


def text(known: dict[str, Any]) -> str:
    """The ways worth a line, the decision, and where the rest is."""
    from edge_client.planning.candidate import CLOUD_FILE, CLOUD_ONLY, EDGE_ONLY

    decision = known["decision"]
    measured, predicted = decision["measured"], decision["predicted"]
    winner = measured["winner"] if measured else None
    shown = {EDGE_ONLY, CLOUD_ONLY, CLOUD_FILE, winner, predicted["winner"] if predicted else None}
    shown |= set(measured["ranking"][:3]) if measured else set()
    rows = []
    for way in known["ways"]:
        if way["name"] not in shown or (way["mode"] == "local" and way["name"] != EDGE_ONLY):
            continue
        foretold, answered = way["predicted"], way["requests"] - way["failed"]
        marks = [
            word for word, who in (("best", measured), ("predicted", predicted)) if who and who["winner"] == way["name"]
        ]
        rows.append(
            [
                printable(way["name"]),
                "-" if way["latency_ns"] is None else milliseconds(way["latency_ns"]),
                milliseconds(foretold["latency_ns"]) if foretold else "-",
                "-" if way["bytes_up"] is None else size(round(way["bytes_up"])),
                f"{way['exact']} of {answered}",
                str(way["failed"] or ""),
                ", ".join(marks),
            ]
        )
    headers = ["way", "ms", "predicted", "up", "exact", "failed", ""]
    lines = [table(headers, rows, right=(1, 2, 3, 4, 5)), ""]
    if decision["median_error_percent"] is not None:
        lines.append(f"predicted against measured: {decision['median_error_percent']:.1f} % off in the median")
    answered = sum(way["requests"] - way["failed"] for way in known["ways"])
    if (exact := sum(way["exact"] for way in known["ways"])) != answered:
        lines.append(f"{answered - exact} of {answered} answers are not bit for bit the whole model's")
    for one in known["failures"][:5]:
        lines.append(f"{one['count']} failed, the first at {one['cut']} with {one['input']}: {one['error']}")
    return "\n".join(printable(line) for part in lines for line in part.split("\n"))


def _say(line: str) -> None:
    print(line, flush=True)


def _complain(line: str) -> None:
    print(f"edge-client: {one_line(line)}", file=sys.stderr, flush=True)
