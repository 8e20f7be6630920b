"""Input by input, and for each all ways in turn, again and again; the journal has each input before the next begins."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_client.answer import Answer
from edge_client.core import CONNECTION_ERRORS
from edge_client.given import Given
from edge_client.modes import CLOUD_FILE
from edge_client.screen.text import one_line
from edge_client.sweeping.journal import Journal
from edge_client.sweeping.meter import Meter, Reference
from edge_client.sweeping.observed import SHOWN, Observed, kept, way_of
from edge_client.sweeping.records import Records
from edge_client.sweeping.ways import Way, rotated
from shared_hooks.errors import HookRefused
from shared_hooks.showing import short


@short
@dataclass
class SweepRun:
    """A sweep's work: made of what it is, run by `run`. ``seconds``: the budget, for the measuring alone; one round of
    one input is made, whatever it takes.
    """

    meter: Meter
    inputs: Sequence[Given]
    ways: Sequence[Way]
    repetitions: int
    warmup: int
    journal: Journal
    on_step: Callable[[str], None]
    seconds: float | None = None
    layer_repetitions: int = 1
    """In as many rounds of an input each way runs a second time, with its layers measured."""
    observers: Sequence[str] = ()
    """Observers of one more request for each input."""
    clock: Callable[[], float] = time.monotonic
    over: bool = field(default=False, init=False)
    """Whether the budget ended it."""
    _sequence: int = field(default=0, init=False)

    def run(self, done: frozenset[int]) -> None:
        """Measure the inputs that are not ``done``. Errors of the connection (`CONNECTION_ERRORS`) end it, and a server
        that allows no such observers (HookRefused); the input under way is lost, those before it are in the journal.
        """
        left = [index for index in range(len(self.inputs)) if index not in done]
        self._warm_up(left)
        began = self.clock()
        for index in left:
            if self.over:
                return
            self.journal.write(self._input(index, began))

    def _warm_up(self, left: Sequence[int]) -> None:
        """Plans, recipes, caches: with the first input that can be read. A server that cannot read files is noted."""
        for index in left:
            try:
                self.meter.reference(self.inputs[index])
            except Exception:  # reported when its turn comes
                continue
            if self.observers:
                self._observed(self.inputs[index])
            for way in tuple(self.ways):
                for _ in range(self.warmup):
                    try:
                        self.meter.request(way, self.inputs[index])
                    except CONNECTION_ERRORS:
                        raise
                    except Exception as error:  # as above
                        if way.name == CLOUD_FILE:
                            self.ways = [one for one in self.ways if one is not way]
                            self.journal.write({"skipped": way.name, "why": one_line(str(error))})
                        break
                self.on_step(f"warm-up: {way}")
            return

    def _input(self, index: int, began: float) -> dict[str, Any]:
        sweep_input = self.inputs[index]
        records = Records(sweep_input.name, index)
        self._sequence = index * 2 * self.repetitions * len(self.ways)
        try:
            reference: Reference | Exception = self.meter.reference(sweep_input)
        except Exception as error:
            reference = error
        rounds = len(self.inputs) * self.repetitions
        repetition = 0
        for repetition in range(self.repetitions):
            number = index * self.repetitions + repetition
            turns = [(way, False) for way in rotated(self.ways, number, rounds)]
            if repetition < self.layer_repetitions:
                turns += [(way, True) for way, _ in turns]
            for way, layers in turns:
                self._sequence += 1
                try:
                    if isinstance(reference, Exception):
                        raise reference
                    self.meter.record(records, way, sweep_input, reference, repetition, self._sequence, layers)
                except CONNECTION_ERRORS:
                    raise
                except Exception as error:  # this request's own; the others go on
                    text = one_line(f"{type(error).__name__}: {error}")
                    records.fail(
                        way, repetition, self._sequence, text, {"layers": layers, "truth": sweep_input.shown_truth}
                    )
                self.on_step(f"{sweep_input.name}: {way}")
            if self.seconds is not None and self.clock() - began >= self.seconds:
                self.over = True
                break
        entry = {
            "index": index,
            "input": sweep_input.name,
            "repetitions": repetition + 1,
            "requests": records.requests,
            "rows": records.rows,
            "notes": [[*key, count] for key, count in records.notes.items()],
        }
        if self.observers:
            entry["observed"] = self._observed(sweep_input)
            if index < SHOWN and (picture := self.meter.picture(sweep_input)):
                entry["picture"] = picture
        return entry

    def _observed(self, sweep_input: Given) -> Observed:
        way = way_of(self.ways)
        try:
            seen: Answer | Exception = self.meter.observe(way, sweep_input, self.observers)
        except (*CONNECTION_ERRORS, HookRefused):
            raise
        except Exception as error:  # this request's own
            seen = error
        self.on_step(f"{sweep_input.name}: observers")
        return kept(way, seen)
