"""`sweep`: real inputs through every cut, measured, in tables and on a page."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edge_client import interrupts
from edge_client.client import EdgeClient
from edge_client.core import CONNECTION_ERRORS
from edge_client.credentials import Credentials
from edge_client.given import Given
from edge_client.planning.objective import Objective
from edge_client.process.local_server import local_server
from edge_client.screen.progress import progress as bar
from edge_client.screen.text import one_line
from edge_client.settings import OWN
from edge_client.spoken import either, option
from edge_client.survey.gather import Say, Wanted, gather
from edge_client.survey.loaded import Loaded
from edge_client.survey.loading import first_readable
from edge_client.sweeping import extras
from edge_client.sweeping.inputs import handed_over, inputs_that_come_with
from edge_client.sweeping.journal import Journal, open_journal
from edge_client.sweeping.meter import Meter
from edge_client.sweeping.prediction import predicted
from edge_client.sweeping.results import write
from edge_client.sweeping.runner import SweepRun
from edge_client.sweeping.settings import SweepOptions, settings_of
from edge_client.sweeping.ways import Way, choose, ways_of
from edge_client.tasks.subject import Model, address_of, subject_of
from edge_client.tasks.swept import Swept
from edge_client.transport import ConnectionOptions
from shared_hooks.errors import HookRefused, SpecError
from shared_hooks.observers import named

if TYPE_CHECKING:
    from collections.abc import Iterable


def sweep(
    server: str | None,
    model: Model,
    inputs: Any = None,
    *,
    out: str | Path,
    cuts: str | Sequence[str | int] | None = None,
    every: int | None = None,
    repetitions: int = 3,
    layer_repetitions: int = 1,
    warmup: int = 1,
    local: bool = True,
    predict: bool = True,
    profile_repetitions: int = 10,
    profile_seconds: float = 20.0,
    calibrate: bool = False,
    objective: str = "latency",
    codec: str = "raw",
    seconds: float | None = None,
    deadline: float = 60.0,
    patience: float = 15.0,
    observers: Iterable[str] = (),
    fresh: bool = False,
    credentials: Credentials | None = None,
    failures: Literal["raise", "return"] = "raise",
    progress: bool = True,
    say: Say = lambda text: None,
) -> Swept:
    """Run inputs through every cut of ``model``, and measure (docs/sweep.md). Needs the extra "sweep".

        found = edge_client.sweep("cloud:50051", "digits", ["a.png", "b.png"], out="sweep", every=4)
        found.best                # the fastest way, as measured
        found.to_pandas()         # one row a way
        found.requests()          # one row a request, a polars data frame
        found.report              # the page, sweep/report.html

    ``server`` and ``model``: as for `plan`. ``inputs``: files, folders, arrays, calls; nothing: the images that come
    with the model, or its example. ``out``: the folder of results, and of a journal: the same call continues where an
    earlier one stopped; ``fresh`` starts over. ``cuts``: names or ids of layers; ``every``: every n-th cut.
    ``seconds``: no input is begun after as many. ``local``: the cuts in this process, too. ``predict``: a
    plan first, to compare with. ``observers``: of one more request for each input. ``say`` gets lines for people as
    they come up.

    A sweep that is interrupted, or loses its server, writes what it has and raises; ``failures="return"`` returns it,
    and `Swept.failure` says why. Raises as `plan` does, and SpecError for a folder of another sweep.
    """
    extras.check()
    goal = Objective.parse(objective)
    for name, count in (("repetitions", repetitions), ("every", 1 if every is None else every)):
        if count < 1:
            raise SpecError(f"{name}={count}: must be a whole number of at least 1")
    address = address_of(server)
    how = SweepOptions(
        server=None if address == OWN else address,
        credentials=credentials or Credentials(),
        codec=codec,
        repetitions=repetitions,
        layer_repetitions=layer_repetitions,
        warmup=warmup,
        observers=tuple(named.check(observers)),
        seconds=seconds,
        deadline=deadline,
        patience=patience,
        predict=predict,
        profile_repetitions=profile_repetitions,
        profile_seconds=profile_seconds,
        calibrate=calibrate,
        progress=progress,
    )
    subject = subject_of(model, handed_over(inputs), address, credentials)
    if "tokens" in how.observers:
        subject.spec.load_tokenizer()  # a wrong one is reported before hours of work
    items = subject.inputs or inputs_that_come_with(subject.spec)
    subject = replace(subject, inputs=items)
    with open_journal(str(out)) as journal, ExitStack() as stack:
        loaded = subject.load()
        stack.callback(loaded.wrapped.detach)
        chosen = choose(
            loaded.wrapped.layers, cuts if cuts is None or isinstance(cuts, str) else ",".join(map(str, cuts)), every
        )
        ways = ways_of(chosen, files=all(each.item for each in items), local=local)
        contents = journal.begin(settings_of(how, loaded, items, ways), fresh)
        done = frozenset(contents.done)
        ended: str | None = None
        failure: BaseException | None = None
        if len(done) == len(items):
            say(f"{journal.folder}: all {len(done)} inputs are measured already; {option('fresh')} measures them again")
        else:
            if done:
                say(f"{journal.folder}: going on after {len(done)} of {len(items)} inputs")
            try:
                ended = _measure(how, loaded, items, ways, journal, done, goal, stack, say)
            except KeyboardInterrupt as error:
                interrupts.heard()
                ended, failure = "interrupted", error
            except HookRefused as error:  # an older server has no more special name for it
                ended, failure = f"{either('--observe', 'observers')}: {one_line(str(error))}", error
            except CONNECTION_ERRORS as error:
                ended, failure = one_line(f"{type(error).__name__}: {error}"), error
        measured = len(journal.read().done)
        summary = write(journal, ways, ended, goal) if measured else None
    if failure is not None and failures == "raise":
        raise failure
    return Swept(journal.folder, summary, measured, len(items), ended, failure)


def _measure(
    how: SweepOptions,
    loaded: Loaded,
    inputs: Sequence[Given],
    ways: Sequence[Way],
    journal: Journal,
    done: frozenset[int],
    objective: Objective,
    stack: ExitStack,
    say: Say,
) -> str | None:
    """Why it ended early; None: it did not."""

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
    return f"the budget of {how.seconds:g} s was used up" if run.over else None


def _server(
    how: SweepOptions,
    loaded: Loaded,
    inputs: Sequence[Given],
    journal: Journal,
    objective: Objective,
    stack: ExitStack,
    say: Say,
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
            gathered = stack.enter_context(gather(loaded, wanted, say, how.progress))
            journal.write({"prediction": predicted(gathered, objective)})
            if gathered.server is not None:
                return gathered.server
        except Exception as error:  # whatever it is, measured numbers need no prediction
            say(f"warning: no prediction: {type(error).__name__}: {error}")
    if how.server:
        return how.server
    if not how.predict:  # else it has been said
        say("starting a server on this machine")
    return stack.enter_context(local_server(loaded.choice, observers=how.observers))
