"""Run real inputs through every cut, measure, and write tables and a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from edge_client import interrupts
from edge_client.client import EdgeClient
from edge_client.core import CONNECTION_ERRORS
from edge_client.credentials import Credentials
from edge_client.options import SweepOptions
from edge_client.planning.leakage import LeakageBound, LeakageTable, read
from edge_client.planning.objective import Objective
from edge_client.process import local_server
from edge_client.screen import Row, Tabular, milliseconds, one_line, printable, size, table
from edge_client.screen import progress as bar
from edge_client.settings import OWN
from edge_client.survey import Say, SurveySources, gather
from edge_client.sweeping import settings
from edge_client.sweeping.records import Way, choose, ways_of
from edge_client.sweeping.report import write
from edge_client.sweeping.runner import RequestMeter, SweepRun
from edge_client.sweeping.settings import (
    Journal,
    Sweeping,
    handed_over,
    inputs_that_come_with,
    open_journal,
    predicted,
    settings_of,
)
from edge_client.sweeping.summary import MeasuredWay, SweepSummary
from edge_client.tasks.engines import ONNXRUNTIME, TORCH, asked, engines_of, in_words
from edge_client.tasks.subject import Model, Subject, address_of, subject_of
from edge_client.transport import ConnectionOptions
from edge_client.user_input import LoadedModel, NamedInput, first_readable
from edge_client.user_text import CLOUD_FILE, CLOUD_ONLY, EDGE_ONLY, either, option
from shared_hooks.codecs import check
from shared_hooks.errors import HookRefused, SpecError
from shared_hooks.observers import named
from shared_hooks.options import takes

if TYPE_CHECKING:
    import polars


# The result of a sweep: the paths of its files, and their content.


_FEW: Final = 12
"""Number of ways up to which all are shown, one per line."""


@dataclass(frozen=True, repr=False)
class Swept(Tabular):
    """Result of `edge_client.sweep`. A row is a way to run a request, as measured; times in ns.

    ``folder`` holds the tables, summary.json and the page (`report`). It covers ``measured`` of ``inputs`` inputs;
    ``ended`` says why not all, and ``failure`` is the exception. ``summary`` is None if nothing was measured.
    """

    folder: Path
    summary: SweepSummary | None
    measured: int
    inputs: int
    ended: str | None = None
    failure: BaseException | None = None

    shown = {  # noqa: RUF012
        "name": "way",
        "mode": "",
        "latency_ns": "ms",
        "predicted_latency_ns": "predicted",
        "bytes_up": "bytes up",
        "exact": "exact",
        "requests": "of",
        "failed": "failed",
    }

    drawn = "latency_ns"

    @property
    def report(self) -> Path:
        """The page, for a browser."""
        return self.folder / "report.html"

    @property
    def best(self) -> str | None:
        """The winner's name, as measured; None if there is nothing to decide."""
        decision = self.summary.outcome.measured if self.summary else None
        return decision.winner.name if decision else None

    @property
    def ways(self) -> list[MeasuredWay]:
        """The measurements of each way."""
        return list(self.summary.ways) if self.summary else []

    def requests(self) -> polars.DataFrame:
        """Return one row per request (docs/sweep.md): requests.parquet as a polars frame.

        Its own ``to_pandas()`` needs pyarrow; ``pandas.DataFrame(found.requests().to_dict(as_series=False))`` does not.
        """
        import polars as pl

        return pl.read_parquet(self.folder / "requests.parquet")

    def layers(self) -> polars.DataFrame:
        """Return one row per request, side and layer: rows.parquet as a polars frame, as `requests`."""
        import polars as pl

        return pl.read_parquet(self.folder / "rows.parquet")

    def as_dict(self) -> dict[str, Any]:
        """Return the data of summary.json."""
        found: dict[str, Any] = self.summary.as_dict() if self.summary else {"ended": self.ended}
        return found

    def title(self) -> str:
        if self.summary is None:
            return f"{self.folder}: nothing was measured"
        best = f"{self.best} is best in {self.summary.outcome.objective}" if self.best else "nothing is best"
        much = "" if self.ended is None else f" ({self.measured} of {self.inputs} inputs: {self.ended})"
        return f"{self.summary.settings['model']}: {best} of {len(self.ways)} ways{much}; {self.report}"

    def rows(self) -> list[Row]:
        return [_row(way) for way in self.ways]

    def text(self) -> str:
        """Format the ways worth a line, the decision, and where the rest is."""
        found = self.summary
        if found is None:
            return f"nothing was measured{f': {self.ended}' if self.ended else ''}"
        decision = found.outcome
        measured = decision.measured
        best, planned = self.best, (decision.predicted or {}).get("winner")
        shown = {EDGE_ONLY, CLOUD_ONLY, CLOUD_FILE, best, planned}
        shown |= {one.name for one in measured.ranking[:3]} if measured else set()
        known = [way for way in found.ways if way.mode != "local" or way.name == EDGE_ONLY]
        worth = [way for way in known if way.name in shown] if len(known) > _FEW else known
        rows = [_cells(way, {"measured": best, "predicted": planned}) for way in worth]
        headers = ["way", "ms", "predicted", "up", "exact", "failed", "best as"]
        lines = [table(headers, rows, right=(1, 2, 3, 4, 5)), ""]
        if len(worth) < len(known):
            lines.append(
                f"{len(worth)} of {len(known)} ways: the best, and those to compare with; all are in the report"
            )
        if decision.median_error_percent is not None:
            lines.append(f"predicted against measured: {decision.median_error_percent:.1f} % off in the median")
        answered = sum(way.answered for way in found.ways)
        if (exact := sum(way.exact for way in found.ways)) != answered:
            lines.append(f"{answered - exact} of {answered} answers are not bit for bit the whole model's")
        for name, one in found.engines.items():
            lines.append(in_words(name, one))
        for one in found.failures[:5]:
            lines.append(f"{one['count']} failed, the first at {one['cut']} with {one['input']}: {one['error']}")
        return "\n".join(printable(line) for part in lines for line in part.split("\n"))


def _cells(way: MeasuredWay, marks: Mapping[str, str | None]) -> list[str]:
    timed = way.timed
    return [
        printable(way.name),
        "-" if timed is None else milliseconds(timed.latency_ns),
        milliseconds(way.predicted.latency_ns) if way.predicted else "-",
        "-" if timed is None else size(round(timed.bytes_up)),
        f"{way.exact} of {way.answered}",
        str(way.failed or ""),
        ", ".join(word for word, name in marks.items() if name == way.name),
    ]


def _row(way: MeasuredWay) -> Row:
    timed, low, high = way.timed, None, None
    if timed is not None:
        low, _, high = timed.quartiles_ns
    return {
        "name": way.name,
        "mode": way.mode,
        "layer_id": way.layer_id,
        "latency_ns": way.latency_ns,
        "latency_q1_ns": low,
        "latency_q3_ns": high,
        "predicted_latency_ns": way.predicted.latency_ns if way.predicted else None,
        "bytes_up": timed.bytes_up if timed else None,
        "bytes_down": timed.bytes_down if timed else None,
        "edge_energy_j": way.edge_energy.value,
        "edge_energy_status": way.edge_energy.status,
        "cloud_energy_j": way.cloud_energy.value,
        "requests": way.requests,
        "failed": way.failed,
        "exact": way.exact,
    }


@takes(SweepOptions)
def sweep(server: str | None, model: Model, inputs: Any = None, *, options: SweepOptions) -> Swept:
    """Run inputs through every cut of ``model``, and measure (docs/sweep.md). Needs the extra "sweep".

        found = edge_client.sweep("cloud:50051", "digits", ["a.png", "b.png"], output="sweep", every=4)
        found.best                # the fastest way, as measured
        found.to_pandas()         # one row a way
        found.requests()          # one row a request, a polars data frame
        found.report              # the page, sweep/report.html

    ``server`` and ``model``: as for `plan`. ``inputs``: files, folders, arrays, calls; None: the images that come with
    the model, or its example. ``output``: a folder for results and a journal: the same call resumes an interrupted
    sweep; ``fresh`` starts over. ``cuts``: names or ids of layers, "a + b" along branches; ``every``: every n-th cut.
    ``seconds``: no input is begun after as many. ``local``: the cuts in this process, too. ``predict``: plan first, to
    compare. ``observers``: attached to one more request for each input. ``engine``: "torch", and with it "onnxruntime":
    each cut is requested with a head in it, too; the server needs its tails by name (``--tails all``; our own has
    them). ``say`` receives lines for people as they come up.

    A sweep that is interrupted, or loses its server, writes what it has and raises; ``failures="return"`` returns it
    instead, with `Swept.failure`. Raises as `plan` does, and SpecError for the folder of another sweep.
    """
    settings.check()
    goal = Objective.parse(options.objective)
    for name, count in (("repetitions", options.repetitions), ("every", 1 if options.every is None else options.every)):
        if count < 1:
            raise SpecError(f"{name}={count}: must be a whole number of at least 1")
    engines = tuple(one for one in engines_of(options.engine) if one != TORCH)
    if set(engines) - {ONNXRUNTIME}:
        raise SpecError(f"{option('engine')}: sweeps ask with heads in {TORCH} and {ONNXRUNTIME}; plan times others")
    address = address_of(server)
    how = Sweeping(
        **{
            **vars(options),
            "server": None if address == OWN else address,
            "codec": check(options.codec),
            "observers": tuple(named.check(options.observers)),
            "engines": engines,
        }
    )
    subject = subject_of(model, handed_over(inputs), address, options.credentials)
    if "tokens" in how.observers:
        subject.spec.load_tokenizer()  # a wrong one is reported before hours of work
    items = subject.inputs or inputs_that_come_with(subject.spec)
    subject = replace(subject, inputs=items)
    with open_journal(str(options.output)) as journal, ExitStack() as stack:
        loaded = subject.load()
        stack.callback(loaded.wrapped.detach)
        leaks = _leaks(options.leakage, how.codec, loaded)
        cuts = options.cuts
        named_cuts = cuts if cuts is None or isinstance(cuts, str) else ",".join(map(str, cuts))
        chosen = choose(loaded.cuts, named_cuts, options.every, loaded.plan.resolve)
        ways = ways_of(chosen, files=all(each.item for each in items), local=options.local)
        contents = journal.begin(settings_of(how, loaded, items, ways), options.fresh)
        done = frozenset(contents.done)
        ended: str | None = None
        failure: BaseException | None = None
        if len(done) == len(items) and not set(how.engines) - contents.engines.keys():
            options.say(
                f"{journal.folder}: all {len(done)} inputs are measured already; {option('fresh')} measures them again"
            )
        else:
            if done:
                options.say(f"{journal.folder}: going on after {len(done)} of {len(items)} inputs")
            try:
                ended = _measure(how, loaded, subject, ways, journal, done, goal, stack, options.say)
            except KeyboardInterrupt as error:
                interrupts.acknowledge()
                ended, failure = "interrupted", error
            except HookRefused as error:  # an older server has no more specific error
                ended, failure = f"{either('--observe', 'observers')}: {one_line(str(error))}", error
            except CONNECTION_ERRORS as error:
                ended, failure = one_line(f"{type(error).__name__}: {error}"), error
        measured = len(journal.read().done)
        summary = write(journal, ways, ended, goal, leaks) if measured else None
    if failure is not None and options.failures == "raise":
        raise failure
    return Swept(journal.folder, summary, measured, len(items), ended, failure)


def _leaks(given: str | Path | LeakageTable | None, codec: str, loaded: LoadedModel) -> Callable[[str], float | None]:
    """Return the leakage of each way. Raises SpecError for a file of other weights."""
    if given is None:
        return lambda way: None
    table = given if isinstance(given, LeakageTable) else read(given)
    table.check(loaded.wrapped.weights_hash())
    return lambda way: LeakageBound(table, 1.0, codec).of(way)


def _measure(
    how: Sweeping,
    loaded: LoadedModel,
    subject: Subject,
    ways: Sequence[Way],
    journal: Journal,
    done: frozenset[int],
    objective: Objective,
    stack: ExitStack,
    say: Say,
) -> str | None:
    """Run the sweep. Returns why it ended early, or None."""
    inputs = subject.inputs
    if how.engines and how.server is None:
        say("starting a server on this machine, with tails by name")
        own = local_server(loaded.choice, observers=how.observers, arguments=["--tails", "all"])
        how = replace(how, server=stack.enter_context(own), credentials=Credentials())
    server = _server(how, loaded, inputs, journal, objective, stack, say)
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
    client.open()
    with bar("sweep", steps, how.progress) as on_step:
        run = SweepRun(
            RequestMeter(client, loaded.spec, how.codec),
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
    names = list(dict.fromkeys(way.name for way in ways if way.layer_id is not None and way.layer_id >= 0))
    for name in how.engines:
        if name in journal.read().engines:
            continue
        say(f"each cut again, with heads in {name}")
        credentials = how.credentials_for(server)
        measured = asked(server, subject, names, how.warmup, how.repetitions, credentials)
        journal.write({"engine": name, "measured": measured})
    return f"the budget of {how.seconds:g} s was used up" if run.over else None


def _server(
    how: Sweeping,
    loaded: LoadedModel,
    inputs: Sequence[NamedInput],
    journal: Journal,
    objective: Objective,
    stack: ExitStack,
    say: Say,
) -> str:
    """Return the server's address, starting our own if none is given.

    Writes the plan's prediction to the journal first, unless it is there. A sweep works without a prediction.
    """

    if how.predict and journal.read().prediction is None:
        files = [each.item for each in inputs if each.item is not None]
        file = first_readable(loaded.spec, files) if files else None
        wanted = SurveySources(
            server=how.server,
            credentials=how.credentials or Credentials(),
            file=str(file.path) if file is not None else None,
            repetitions=how.profile_repetitions,
            seconds=how.profile_seconds,
            codec=how.codec,
            correct=how.correct,
            observers=how.observers,
        )
        try:
            gathered = stack.enter_context(gather(loaded, wanted, say, how.progress))
            journal.write({"prediction": predicted(gathered, objective)})
            if gathered.server is not None:
                return gathered.server
        except Exception as error:  # whatever fails, measured numbers need no prediction
            say(f"warning: no prediction: {type(error).__name__}: {error}")
    if how.server:
        return how.server
    if not how.predict:  # otherwise it has been printed
        say("starting a server on this machine")
    return stack.enter_context(local_server(loaded.choice, observers=how.observers))
