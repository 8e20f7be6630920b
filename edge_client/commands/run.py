"""Implement ``edge-client run``: run inputs through a cut, print predictions and times."""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from edge_client import interrupts
from edge_client.answer import Answer, Failure
from edge_client.client import EdgeClient
from edge_client.commands import common
from edge_client.commands.common import Looking, check_json_target, credentials_of, needed, running, say, write_json
from edge_client.commands.feed import Feed, Named, RunRate, choice_of, cut_for, feed_of, first_readable
from edge_client.commands.hooks import as_dicts, configured
from edge_client.commands.report import InputOutcome, RunReport, check_witness
from edge_client.commands.run_files import KeptFiles, RunJournal
from edge_client.core import CONNECTION_ERRORS
from edge_client.screen import milliseconds, one_line, printable, progress
from edge_client.transport import ConnectionOptions, now_ns
from edge_client.user_text import EDGE_ONLY
from shared_hooks.errors import IsthmusError, SpecError
from shared_hooks.lifecycle.registry import is_default, lines
from shared_hooks.metrics.sampler import throttling
from shared_hooks.models import InputItem, ModelSpec

if TYPE_CHECKING:
    from edge_client.adaptive import AutoClient
    from edge_client.commands.auto import Choosing
    from edge_client.commands.run_files import HeatMaps

AUTO: Final = "auto"


EVERY_SECONDS: Final = 1.0


class ServiceManager:
    """Reports a run to systemd (sd_notify(3)): READY=1 with the first answer, and WATCHDOG=1 with later ones, so that a
    run that stops answering is restarted. Does nothing without ``NOTIFY_SOCKET`` in the environment.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ, clock: Callable[[], float] = time.monotonic) -> None:
        where = environ.get("NOTIFY_SOCKET", "")
        self._address = f"\0{where[1:]}" if where.startswith("@") else where
        self._clock = clock
        self._last: float | None = None

    def answered(self, status: str) -> None:
        """Report an answer; ``status``: one line for ``systemctl status``. Sends at most once per second."""
        now = self._clock()
        if not self._address or (self._last is not None and now - self._last < EVERY_SECONDS):
            return
        self._send(f"{'READY=1' if self._last is None else 'WATCHDOG=1'}\nSTATUS={status}")
        self._last = now

    def stopping(self) -> None:
        """Report that the run is ending: current requests finish, and no others start."""
        if self._address:
            self._send("STOPPING=1")

    def _send(self, text: str) -> None:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as plug:
                plug.sendto(text.encode(), self._address)
        except OSError:  # a service manager that is not notified ends the run by its watchdog
            pass


class JournalFull(SpecError):
    """The journal cannot be written any more: outcomes that are not in it are not shown, and run again another time."""


def main(options: argparse.Namespace) -> int:
    """Send every input and print its outcome; return the exit status."""
    common.check_effects(options)
    here = options.split == EDGE_ONLY
    server = None if here else needed(options, chain=True)
    check_json_target(options.json)
    check_witness(options.witness, options.split, options.log_level)
    _check_only_head(options)
    _check_losses(options)
    chooses = None
    if options.split == AUTO:
        from edge_client.commands import auto  # imports planning, profiling and measuring

        chooses = auto.choosing_of(options)
        auto.log_moves(options.debug)
    with (
        closing(feed_of(options)) as feed,
        running(server, choice_of(options), options.observers) as address,
        closing(Looking(options.sinks, options.dashboard)) as looking,
    ):
        return _run(options, address, feed, chooses, looking)


def _run(
    options: argparse.Namespace, server: str | None, feed: Feed, chooses: Choosing | None, looking: Looking
) -> int:
    choice = choice_of(options)
    spec = choice.spec()
    lifecycle = configured(options.config, options.log_level, options.log_format)
    maps = None if options.heat_maps is None else _heat_maps(options.heat_maps, options.observers)
    kept = None if options.output is None else KeptFiles(options.output, spec)
    chain = server.split(",") if server is not None and "," in server else None
    client = EdgeClient(
        chain or server,
        choice.with_spec(spec),
        EDGE_ONLY if chain else "input",
        auto=chooses.options if chooses else None,
        codec=options.codec.split(",") if chain else options.codec,
        calibration=options.calibration,
        max_loss=options.max_loss,
        metrics=bool(options.layers or options.json or looking.wanted),
        deadline=options.deadline,
        observers=options.observers,
        witness=options.witness,
        fallback=options.fallback,
        exact=options.exact,
        lifecycle=lifecycle,
        connection=ConnectionOptions(
            patience=options.patience,
            max_in_flight=options.in_flight,
            credentials=credentials_of(options),
        ),
    )
    manager, before_run = ServiceManager(), throttling()
    decisions: list[dict[str, Any]] | None = None
    journal: RunJournal | None = None
    before: list[dict[str, Any]] = []
    stopped = False
    try:
        looking.begin(client)
        client.prepare()
        if chain and chooses:
            if chooses.log is not None:
                raise SpecError("--log-decisions: not along a chain, whose moves are on standard error")
            client.split, chooses = AUTO, None  # the client chooses, and logs its moves
            client.open()
        elif chain:
            client.split = [cut_for(client, cut, feed.samples) for cut in options.split.split(",")]
        else:
            client.split = "input" if chooses else cut_for(client, options.split, feed.samples)
        if client.loaded is not None:
            say(f"{client.loaded} (--only-head {options.only_head})")
        if options.journal:
            journal = RunJournal(options.journal, {"model": spec.model_id, "weights": client.wrapped.weights_hash()})
            assert feed.items is not None
            feed.items, before = journal.left(feed.items)
        tally = feed.tally if feed.items is None else None
        about = (spec.model_id, server, options.split, options.codec, str(client.device), options.witness)
        report = RunReport(*about, tally, RunRate(options.in_flight, options.warmup))
        if before:
            report.resume(before)
            say(f"{len(before)} inputs are in {options.journal} already")
        try:
            if feed.items == []:
                report.start()
            elif chooses:
                from edge_client.commands import auto

                chosen: list[Any] = []
                try:
                    with auto.auto_client(chooses, client, feed.samples) as chooser:
                        chosen.append(chooser)
                        looking.follow(chooser)
                        _warm_up(chooser, spec, feed, options.warmup)
                        looking.count(client)
                        report.start()
                        _send(chooser, spec, feed, report, maps, kept, journal, manager, show=not options.no_progress)
                finally:  # when the controller has stopped
                    decisions = chosen[0].decisions.all if chosen else []
            else:
                client.open()
                _warm_up(client, spec, feed, options.warmup)
                looking.count(client)
                report.start()
                _send(client, spec, feed, report, maps, kept, journal, manager, show=not options.no_progress)
        except JournalFull as error:
            stopped = True
            say(f"{_one_line(error)}", "error")
        except CONNECTION_ERRORS as error:
            if options.debug:
                raise
            report.give_up(feed.unanswered(), error)
            say(f"{_one_line(error)}", "error")
        except KeyboardInterrupt:  # what was answered is still reported
            interrupts.acknowledge()
            report.interrupted = True
            say("interrupted")
        for broken in feed.broken:
            say(f"--input: {one_line(str(broken))}", "error")
        feed.tally.stop()
        report.finish(client.refused, client.unlike)
        if reasons := throttling().since(before_run):
            say(f"this machine was held back ({', '.join(reasons)}): these are not its usual times")
    finally:
        manager.stopping()
        client.close()
        if journal is not None:
            journal.close()
    status = (
        common.INTERRUPTED
        if report.interrupted
        else common.USAGE
        if stopped
        else common.CONNECTION
        if report.gave_up
        else common.SOME_FAILED
        if report.some_failed or report.refused or feed.broken
        else common.OK
    )
    # The text first: if the disk is full, only the file is lost.
    if report.answered or not (report.gave_up or report.interrupted):
        print(report.as_text(options.layers, options.depth), flush=True)
        if not is_default(lifecycle):
            print("\n" + "\n".join(lines(lifecycle)), flush=True)
    if options.json:
        known = report.as_dict() if decisions is None else {**report.as_dict(), "decisions": decisions}
        write_json({**known, "lifecycle": as_dicts(lifecycle), "exit_status": status}, options.json, options.stdout)
    for written in (maps, kept):
        if written is not None:
            print(printable(written.summary()), flush=True)
    return status


def _warm_up(client: EdgeClient | AutoClient, spec: ModelSpec, feed: Feed, count: int) -> None:
    """Make ``count`` requests that are not counted; failures in them are reported when the input's turn comes."""
    if count:
        first = first_readable(spec, feed.samples)
        for _ in client.infer_many([first] * count, prepare=spec.preprocess, failures="return"):
            pass


def _send(
    client: EdgeClient | AutoClient,
    spec: ModelSpec,
    feed: Feed,
    report: RunReport,
    maps: HeatMaps | None,
    kept: KeptFiles | None,
    journal: RunJournal | None,
    manager: ServiceManager,
    *,
    show: bool,
) -> None:
    names = ["" if feed.items is None else printable(item.name) for item in feed.items or ()]
    width = max(map(len, names), default=len(printable(feed.source.name)))
    feed.tally.start()
    with progress("frames" if feed.items is None else "inputs", len(feed.items or ()) or feed.most, show) as advance:
        answers = client.infer_many(feed, prepare=spec.preprocess, failures="return")
        for answer in answers:
            item = feed.next_done()
            number = feed.place(item)
            outcome = _outcome(spec, item, answer)
            if kept is not None and isinstance(answer, Answer):
                kept.write(number, item, answer.output, outcome.predictions)
            if journal is not None:
                assert isinstance(item, InputItem)
                try:
                    journal.add(item, outcome.as_dict(), outcome.error)
                except SpecError as error:
                    raise JournalFull(str(error)) from error
            report.add(outcome)
            if outcome.error is None:
                feed.tally.add()
            advance(feed.tally.line() if feed.items is None else printable(item.name))
            if outcome.error is None:
                manager.answered(f"{report.answered} answered, the last in {milliseconds(outcome.measured_ns)} ms")
                print(report.line(outcome, width), flush=True)
                if maps is not None and outcome.answer is not None:
                    maps.write(number, item.name, outcome.answer.observations)
            else:
                say(f"{printable(item.origin)}: {_one_line(outcome.error)}")


def _check_losses(options: argparse.Namespace) -> None:
    """Raise SpecError, before a server is started, for what `EdgeClient` would refuse."""
    if options.codec == AUTO or options.calibration or options.max_loss:
        from edge_client.planning.codecs import Codecs  # only for runs that choose codecs

        Codecs.of(options.codec, options.calibration, options.max_loss)


def _check_only_head(options: argparse.Namespace) -> None:
    """Raise SpecError for what runs the whole model here, too."""
    what = {AUTO: "--split auto", EDGE_ONLY: "--split edge-only"}.get(options.split)
    what = what or (options.witness and "--witness") or (options.fallback and f"--fallback {options.fallback}")
    if options.only_head is not None and what:
        raise SpecError(
            f"{what} needs the whole model here, and --only-head leaves the weights of the tail in their files"
        )


def _heat_maps(folder: str, observers: Sequence[str]) -> HeatMaps:
    """Open the folder of --heat-maps. Raises SpecError before any work is done."""
    if "attention" not in observers:
        raise SpecError("--heat-maps needs --observe attention")
    from edge_client.commands.run_files import HeatMaps

    return HeatMaps(folder)


def _outcome(spec: ModelSpec, item: Named, answer: Answer | Failure) -> InputOutcome:
    if isinstance(answer, Failure):
        return InputOutcome(item, error=answer.error)
    try:
        predictions = spec.postprocess(answer.output)
    except IsthmusError as error:
        return InputOutcome(item, error=error)
    spent = now_ns() - answer.finished_ns
    return InputOutcome(
        item,
        predictions,
        replace(answer, output=None),  # it may be large, and is not shown
        replace(answer.times, postprocess=spent),
        measured_ns=answer.measured_ns + spent,
    )


def _one_line(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}")
