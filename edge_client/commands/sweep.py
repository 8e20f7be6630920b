"""``edge-client sweep``: real inputs through every cut, in tables and on a page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from edge_client import interrupts
from edge_client.client import CONNECTION_ERRORS, EdgeClient
from edge_client.commands import exits
from edge_client.commands.credentials import credentials_of
from edge_client.commands.loading import choice_of, first_readable, load
from edge_client.commands.output import check_json_target, table, write_json
from edge_client.commands.server import chosen
from edge_client.model_choice import ModelChoice
from edge_client.modes import CLOUD_FILE, CLOUD_ONLY, EDGE_ONLY
from edge_client.planning.objective import Objective
from edge_client.process.local_server import local_server
from edge_client.screen.progress import progress
from edge_client.screen.text import milliseconds, one_line, printable, size
from edge_client.settings import OWN
from edge_client.survey.gather import Wanted, gather
from edge_client.survey.loaded import Loaded
from edge_client.sweeping import extras
from edge_client.sweeping.inputs import SweepInput, inputs_of
from edge_client.sweeping.journal import Journal, open_journal
from edge_client.sweeping.meter import Meter
from edge_client.sweeping.outcome import Summary
from edge_client.sweeping.prediction import predicted
from edge_client.sweeping.results import write
from edge_client.sweeping.runner import SweepRun
from edge_client.sweeping.settings import SweepOptions, settings_of
from edge_client.sweeping.ways import Way, choose, ways_of
from edge_client.transport import ConnectionOptions
from shared_hooks.errors import HookRefused, IsthmusError
from shared_hooks.observers import named


def main(options: argparse.Namespace) -> int:
    """Measure what is not measured yet, write the results; exit status."""
    extras.check()
    check_json_target(options.json)
    objective = Objective.parse(options.objective)
    how = _how(options)
    choice = choice_of(options)
    spec = choice.spec()
    if "tokens" in how.observers:
        spec.load_tokenizer()  # a wrong one is reported before hours of work
    inputs = inputs_of(spec, options.input)
    with open_journal(options.out) as journal, ExitStack() as stack:
        loaded = _load(choice, inputs)
        stack.callback(loaded.wrapped.detach)
        cuts = choose(loaded.wrapped.layers, options.cuts, options.every)
        ways = ways_of(cuts, files=all(each.item for each in inputs), local=options.local)
        settings = settings_of(how, loaded, inputs, ways)
        contents = journal.begin(settings, options.fresh)
        done = frozenset(contents.done)
        ended, status = None, exits.OK
        if len(done) == len(inputs):
            _say(f"{journal.folder}: all {len(done)} inputs are measured already; --fresh measures them again")
        else:
            if done:
                _say(f"{journal.folder}: going on after {len(done)} of {len(inputs)} inputs")
            try:
                ended, status = _measure(how, loaded, inputs, ways, journal, done, objective, stack)
            except KeyboardInterrupt:
                interrupts.heard()
                ended, status = "interrupted", exits.INTERRUPTED
        found, status = _finish(journal, ways, ended, status, objective)
    if options.json and found is not None:
        write_json({**found.as_dict(), "exit_status": status}, options.json, options.stdout)
    return status


def _how(options: argparse.Namespace) -> SweepOptions:

    server = chosen(options)
    return SweepOptions(
        server=None if server == OWN else server,
        credentials=credentials_of(options),
        codec=options.codec,
        repetitions=options.repetitions,
        layer_repetitions=options.layer_repetitions,
        warmup=options.warmup,
        observers=tuple(named.check(options.observers)),
        seconds=options.seconds,
        deadline=options.deadline,
        patience=options.patience,
        predict=options.predict,
        profile_repetitions=options.profile_repetitions,
        profile_seconds=options.profile_seconds,
        calibrate=options.calibrate,
        progress=not options.no_progress,
        debug=options.debug,
    )


def _load(choice: ModelChoice, inputs: Sequence[SweepInput]) -> Loaded:
    """Planned on the spec's example; without one, on the first input that can be."""

    if choice.spec().example() is not None:
        return load(choice)
    problem: IsthmusError | None = None
    for each in inputs:
        assert each.item is not None  # without an example there are files
        try:
            return load(choice, [str(each.item.path)])
        except IsthmusError as error:
            problem = error
    assert problem is not None
    raise problem


def _measure(
    how: SweepOptions,
    loaded: Loaded,
    inputs: Sequence[SweepInput],
    ways: Sequence[Way],
    journal: Journal,
    done: frozenset[int],
    objective: Objective,
    stack: ExitStack,
) -> tuple[str | None, int]:
    """Why it ended early (None: it did not), and the exit status."""

    server = _server(how, loaded, inputs, journal, objective, stack)
    loaded.wrapped.detach()
    client = EdgeClient(
        server,
        loaded.choice.with_spec(loaded.spec),
        codec=how.codec,
        deadline=how.deadline,
        connection=ConnectionOptions(patience=how.patience, max_in_flight=1, credentials=how.credentials_for(server)),
    )
    stack.callback(client.close)
    rounds = how.repetitions + min(how.repetitions, how.layer_repetitions)
    left = len(inputs) - len(done)
    steps = len(ways) * (1 + left * rounds) + (1 + left if how.observers else 0)
    try:
        client.open()
        with progress("sweep", steps, how.progress) as on_step:
            run = SweepRun(
                Meter(client, loaded.spec, how.codec),
                inputs,
                ways,
                how.repetitions,
                how.warmup,
                journal,
                on_step,
                how.seconds,
                layer_repetitions=how.layer_repetitions,
                observers=how.observers,
            )
            run.run(done)
    except HookRefused as error:  # an older server has no more special name for it
        if how.debug:
            raise
        return f"--observe: {one_line(str(error))}", exits.USAGE
    except CONNECTION_ERRORS as error:
        if how.debug:
            raise
        _complain(f"{type(error).__name__}: {error}")
        return one_line(f"{type(error).__name__}: {error}"), exits.CONNECTION
    return (f"the budget of {how.seconds:g} s was used up" if run.over else None), exits.OK


def _server(
    how: SweepOptions,
    loaded: Loaded,
    inputs: Sequence[SweepInput],
    journal: Journal,
    objective: Objective,
    stack: ExitStack,
) -> str:
    """The server's address; one of our own is started where none is given. Before that, what the plan says: into the
    journal, unless it is there. A sweep without a prediction is a sweep still.
    """

    if how.predict and journal.read().prediction is None:
        files = [each.item for each in inputs if each.item is not None]
        file = first_readable(loaded.spec, files) if files else None
        wanted = Wanted(
            server=how.server,
            credentials=how.credentials,
            file=str(file.path) if file is not None else None,
            repetitions=how.profile_repetitions,
            seconds=how.profile_seconds,
            codec=how.codec,
            calibrate=how.calibrate,
            observers=how.observers,
        )
        try:
            gathered = stack.enter_context(gather(loaded, wanted, _say, how.progress))
            journal.write({"prediction": predicted(gathered, objective)})
            if gathered.server is not None:
                return gathered.server
        except Exception as error:  # whatever it is: measured numbers need no prediction
            if how.debug:
                raise
            _complain(f"no prediction: {type(error).__name__}: {error}")
    if how.server:
        return how.server
    if not how.predict:  # else it has been said
        _complain("no server is named: starting one on this machine")
    return stack.enter_context(local_server(loaded.choice, observers=how.observers))


def _finish(
    journal: Journal,
    ways: Sequence[Way],
    ended: str | None,
    status: int,
    objective: Objective,
) -> tuple[Summary | None, int]:
    """Write tables, summary and page of what the journal holds, and tell; the summary, if any, and the exit status."""

    done = len(journal.read().done)
    if not done:
        _complain(f"nothing was measured{f': {ended}' if ended else ''}; the same command tries again")
        return None, status
    found = write(journal, ways, ended, objective)
    failed = sum(way.failed for way in found.ways)
    if status == exits.OK and failed:
        status = exits.SOME_FAILED
    _say(text(found))
    _say(f"report: {journal.folder / 'report.html'}")
    if ended is not None:
        inputs = f"{done} of {len(found.settings['inputs'])} inputs are measured"
        _complain(f"{ended}: {inputs}; the same command goes on where it stopped")
    return found, status


def text(found: Summary) -> str:
    """The ways worth a line, the decision, and where the rest is."""

    decision = found.outcome
    measured = decision.measured
    best, foretold = measured.winner.name if measured else None, (decision.predicted or {}).get("winner")
    shown = {EDGE_ONLY, CLOUD_ONLY, CLOUD_FILE, best, foretold}
    shown |= {one.name for one in measured.ranking[:3]} if measured else set()
    rows = []
    for way in found.ways:
        if way.name not in shown or (way.mode == "local" and way.name != EDGE_ONLY):
            continue
        timed = way.timed
        marks = [word for word, name in (("best", best), ("predicted", foretold)) if name == way.name]
        rows.append(
            [
                printable(way.name),
                "-" if timed is None else milliseconds(timed.latency_ns),
                milliseconds(way.predicted.latency_ns) if way.predicted else "-",
                "-" if timed is None else size(round(timed.bytes_up)),
                f"{way.exact} of {way.answered}",
                str(way.failed or ""),
                ", ".join(marks),
            ]
        )
    headers = ["way", "ms", "predicted", "up", "exact", "failed", ""]
    lines = [table(headers, rows, right=(1, 2, 3, 4, 5)), ""]
    if decision.median_error_percent is not None:
        lines.append(f"predicted against measured: {decision.median_error_percent:.1f} % off in the median")
    answered = sum(way.answered for way in found.ways)
    if (exact := sum(way.exact for way in found.ways)) != answered:
        lines.append(f"{answered - exact} of {answered} answers are not bit for bit the whole model's")
    for one in found.failures[:5]:
        lines.append(f"{one['count']} failed, the first at {one['cut']} with {one['input']}: {one['error']}")
    return "\n".join(printable(line) for part in lines for line in part.split("\n"))


def _say(line: str) -> None:
    print(line, flush=True)


def _complain(line: str) -> None:
    print(f"edge-client: {one_line(line)}", file=sys.stderr, flush=True)
