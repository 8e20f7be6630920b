"""Measure input by input, and for each all ways in turn, repeatedly; each input is in the journal before the next."""

from __future__ import annotations

import base64
import io
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from edge_client.answer import Answer, Failure
from edge_client.client import EdgeClient
from edge_client.core import CONNECTION_ERRORS
from edge_client.screen import finite, one_line, tables
from edge_client.sweeping.records import Records, Way, rotated
from edge_client.sweeping.settings import Entry, Journal
from edge_client.transport import Times, now_ns
from edge_client.user_input import NamedInput
from edge_client.user_text import CLOUD_FILE, CLOUD_ONLY, EDGE_ONLY
from shared_hooks import EarlyOutput, WrappedModel, devices
from shared_hooks.errors import Disagreement, HookRefused, InputMismatch
from shared_hooks.forward import run_plain
from shared_hooks.metrics import ForwardMetrics, LayerMetrics
from shared_hooks.models import ModelSpec, Prediction
from shared_hooks.models.inputs import to_device
from shared_hooks.observers import named
from shared_hooks.observers.thumbnails import is_thumbnail
from shared_hooks.showing import short
from shared_hooks.tensors import flatten, identical

# Observations: one request more for each input, by a way that covers both sides; it counts for nothing else.
#
# That way is the middle one of the cuts that are swept; without a cut the whole model on the cloud.


FILE: Final = "observations.jsonl"
KEPT_BYTES: Final = 128 * 2**10
"""Maximum bytes kept of each side of an input: a sweep may have many."""
SHOWN: Final = 3
"""Inputs on the page."""
PICTURE_SIDE: Final = 320
"""Maximum side of an input's picture on the page, in pixels."""
ROWS: Final = 16
"""Maximum rows of a table on the page."""

Observed = dict[str, Any]
"""{"way", "observations": side -> hook -> found}, or {"way", "error"}."""


def way_of(ways: Sequence[Way]) -> Way:
    """Return the way to observe."""
    cuts = [way for way in ways if way.networked and way.layer_id is not None and way.layer_id >= 0]
    return cuts[len(cuts) // 2] if cuts else next(way for way in ways if way.name == CLOUD_ONLY)


def kept(way: Way, seen: Answer | Exception) -> Observed:
    """Return what the journal keeps of a request."""
    if isinstance(seen, Exception):
        return {"way": way.name, "error": one_line(f"{type(seen).__name__}: {seen}")}
    found = {side: finite(json.loads(named.to_bytes(one, KEPT_BYTES))) for side, one in seen.observations.items()}
    return {"way": way.name, "observations": found}


def lines(entries: Iterable[Entry]) -> Iterable[str]:
    """Return JSON, one line for each observed input of the journal."""
    for entry in entries:
        if "observed" in entry:
            yield json.dumps({"input": entry["input"], **entry["observed"]}) + "\n"


def section(known: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the observers' section of the page; None without observations."""
    observed: Sequence[Mapping[str, Any]] = known.get("observed", ())
    if not observed:
        return None
    count, observers = len(known["measured_inputs"]), ", ".join(known["settings"]["hooks"])
    more = f" The first {len(observed)} inputs are shown; {FILE} has all {count}." if count > len(observed) else ""
    return {
        "lead": f"{observers}, on both sides of {observed[0]['way']}: one more request for each input, which counts for"
        f" nothing else.{more}",
        "inputs": [_shown(one) for one in observed],
    }


def _shown(one: Mapping[str, Any]) -> dict[str, Any]:
    observations = one.get("observations", {})
    return {
        "name": one["input"],
        "error": one.get("error"),
        "maps": bool(_maps(one)),
        "tables": [
            {
                "title": table.title,
                "headers": [table.headers[1], table.headers[0], *table.headers[2:]],
                "rows": [[row[1], row[0], *row[2:]] for row in table.rows],
                "notes": table.notes,
            }
            for table in tables(observations, ROWS, f"{FILE} has them")
        ],
    }


def drawn(known: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return, for the page's script, each input's picture (None if it has none) and its attention."""
    return [
        {"input": one["input"], "picture": one.get("picture"), "maps": _maps(one)} for one in known.get("observed", ())
    ]


def _maps(one: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "side": side,
            "name": record["name"],
            "shape": [size for size in record.get("shape") or [] if isinstance(size, int)],
            "picture": record["picture"],
            "most": _number(record.get("picture_max")),
            "over": record["over"] if is_thumbnail(record.get("over")) else None,
            "overMost": _number(record.get("over_max")),
        }
        for side, by_hook in one.get("observations", {}).items()
        for record in by_hook.get("attention", {}).get("records", [])
        if is_thumbnail(record.get("picture"))
    ]


def _number(value: Any) -> float | None:
    """Return a number from a server's record, which may hold anything."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def picture_of(spec: ModelSpec, sweep_input: NamedInput) -> str | None:
    """Return an image input as the model sees it, as a data URL; None for other inputs."""
    if sweep_input.item is None:
        return None
    try:
        seen = spec.picture(sweep_input.item.path)
    except InputMismatch:  # reported with the requests that fail because of it
        return None
    if seen is None:
        return None
    picture = seen.convert("RGB")
    picture.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"


# One request of a sweep: run, measured, and compared with the whole model.


# Head and tail in this one process, through bytes as on the wire: whether the split is exact, and its own cost.


@dataclass(frozen=True, slots=True)
class LocalAnswer:
    """As `Answer`, of a request within this process. The cloud's rows are those of the tail run here."""

    output: Any
    layer_id: int
    times: Times
    layers_edge: Sequence[LayerMetrics]
    layers_cloud: Sequence[LayerMetrics]
    forward_edge: ForwardMetrics | None
    forward_cloud: ForwardMetrics | None
    bytes_up: int
    measured_ns: int
    finished_ns: int
    bytes_down: int = 0
    sends: int = 0
    codecs: Sequence[str] = ()


def split_here(
    wrapped: WrappedModel, args: tuple[Any, ...], kwargs: dict[str, Any], cut: str, codec: str, called: int
) -> LocalAnswer:
    """Run one request here; ``called``: its start (`now_ns`), before its input was read. Raises what the
    engine raises.
    """
    prepared = now_ns()
    early: EarlyOutput = wrapped.head(cut, *args, **kwargs)
    returned = now_ns()
    _wait(wrapped)
    head_ns = wrapped.durations().get("head", 0) + now_ns() - returned
    layers_edge, forward_edge = _metrics(wrapped)
    computed = now_ns()
    data = early.to_bytes(codec=codec)
    packed = now_ns()
    arrived = EarlyOutput.from_bytes(data, max_bytes=len(data) + (1 << 30))
    unpacked = now_ns()
    output = wrapped.tail(arrived)
    _wait(wrapped)
    finished = now_ns()
    inject_ns = wrapped.durations().get("inject", 0)
    layers_cloud, forward_cloud = _metrics(wrapped)
    times = Times(
        prepare=prepared - called,
        edge_other=computed - prepared - head_ns,
        edge_compute=head_ns,
        encode=packed - computed,
        server_decode=unpacked - packed,
        server_inject=inject_ns,
        server_compute=finished - unpacked - inject_ns,
    )
    return LocalAnswer(
        output=output,
        layer_id=early.layer_id,
        times=times,
        layers_edge=layers_edge,
        layers_cloud=layers_cloud,
        forward_edge=forward_edge,
        forward_cloud=forward_cloud,
        bytes_up=len(data),
        measured_ns=finished - called,
        finished_ns=finished,
    )


def _metrics(wrapped: WrappedModel) -> tuple[Sequence[LayerMetrics], ForwardMetrics | None]:
    return (wrapped.get_layer_metrics(), wrapped.get_forward_metrics()) if wrapped.metrics_enabled else ([], None)


def _wait(wrapped: WrappedModel) -> None:
    devices.synchronize(wrapped.device)  # otherwise the device's time would count for the next step


Labels = tuple[str, ...] | None
"""The best label of each row; None for an output without class scores."""


@dataclass(frozen=True)
class Reference:
    """The whole model's output for one input, without observers."""

    structure: Any
    tensors: list[Any]
    labels: Labels

    def equals(self, output: Any) -> bool:
        """Return whether ``output`` is bit-identical, on any device."""
        structure, tensors = flatten(output)
        if structure != self.structure or len(tensors) != len(self.tensors):
            return False
        return all(identical(mine, theirs.cpu()) for mine, theirs in zip(self.tensors, tensors, strict=True))


class RequestMeter:
    """Runs requests of one model, one at a time, and adds the results to `Records`."""

    def __init__(self, client: EdgeClient, spec: ModelSpec, codec: str) -> None:
        self._client = client
        self._spec = spec
        self._codec = codec

    def reference(self, sweep_input: NamedInput) -> Reference:
        """Run the whole model. Raises what reading the input or the model raises."""
        args, kwargs = self._placed(sweep_input)
        output = run_plain(self._client.wrapped.model, args, kwargs)
        structure, tensors = flatten(output)
        return Reference(structure, [tensor.cpu() for tensor in tensors], labels_of(self._spec.postprocess(output)))

    def request(self, way: Way, sweep_input: NamedInput) -> Answer | LocalAnswer:
        """Make a request. Raises what goes wrong, including connection errors."""
        if way.mode == "local" and way.name != EDGE_ONLY:
            called = now_ns()
            args, kwargs = self._placed(sweep_input)
            return split_here(self._client.wrapped, args, kwargs, way.name, self._codec, called)
        source: Any = sweep_input.item if way.name == CLOUD_FILE else sweep_input
        answers = self._client.infer_many([source], split=way.name, prepare=self._read, failures="return")
        try:
            (answer,) = answers
        except Disagreement as error:
            if way.name == CLOUD_FILE:  # about reading files, not about the model: the other ways are not affected
                raise InputMismatch(str(error)) from error
            raise
        if isinstance(answer, Failure):
            raise answer.error
        return answer

    def observe(self, way: Way, sweep_input: NamedInput, observers: Sequence[str]) -> Answer:
        """Make a request with observers on both sides. Raises as `request`, and ObserverRefused."""
        before, self._client.observers = self._client.observers, tuple(observers)
        self._client.wrapped.metrics_enabled = False
        try:
            answer = self.request(way, sweep_input)
        finally:
            self._client.observers = before
        assert isinstance(answer, Answer)
        return answer

    def picture(self, sweep_input: NamedInput) -> str | None:
        """Return an image input as the model sees it, for the page; None for other inputs."""
        return picture_of(self._spec, sweep_input)

    def record(
        self,
        records: Records,
        way: Way,
        sweep_input: NamedInput,
        reference: Reference,
        repetition: int,
        sequence: int,
        layers: bool,
    ) -> None:
        """Make one request and add its row, with its ``layers``, or without anything that would delay it. Raises as
        `request`.
        """
        self._client.wrapped.metrics_enabled = layers
        answer = self.request(way, sweep_input)
        labels = labels_of(self._spec.postprocess(answer.output))
        known = {
            "layers": layers,
            "measured_ns": answer.measured_ns,
            "exact": reference.equals(answer.output),
            "top1": None if labels is None else ";".join(labels),
            "top1_agrees": None if labels is None or reference.labels is None else labels == reference.labels,
            "truth": sweep_input.shown_truth,
        }
        records.add(way, repetition, sequence, answer, known)

    def _read(self, sweep_input: NamedInput) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return sweep_input.read(self._spec)

    def _placed(self, sweep_input: NamedInput) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = sweep_input.read(self._spec)
        return to_device(args, self._client.device), to_device(kwargs, self._client.device)


def labels_of(predictions: list[Prediction]) -> Labels:
    """Return the best label of each row."""
    best: dict[int, str] = {}
    for prediction in predictions:
        best.setdefault(prediction.row, prediction.label)
    return tuple(best.values()) or None


@short
@dataclass
class SweepRun:
    """A sweep, run by `run`. ``seconds``: the budget, for the measuring alone; at least one round of one input
    is made.
    """

    meter: RequestMeter
    inputs: Sequence[NamedInput]
    ways: Sequence[Way]
    repetitions: int
    warmup: int
    journal: Journal
    on_step: Callable[[str], None]
    seconds: float | None = None
    layer_repetitions: int = 1
    """Number of rounds of an input in which each way runs a second time, with its layers measured."""
    observers: Sequence[str] = ()
    """Observers of one more request for each input."""
    clock: Callable[[], float] = time.monotonic
    over: bool = field(default=False, init=False)
    """Whether the budget ended it."""
    _sequence: int = field(default=0, init=False)

    def run(self, done: frozenset[int]) -> None:
        """Measure the inputs that are not ``done``.

        Connection errors (`CONNECTION_ERRORS`) and a server that forbids the observers (HookRefused) end it; the
        current input is lost, those before it are in the journal.
        """
        left = [index for index in range(len(self.inputs)) if index not in done]
        self._warm_up(left)
        began = self.clock()
        for index in left:
            if self.over:
                return
            self.journal.write(self._input(index, began))

    def _warm_up(self, left: Sequence[int]) -> None:
        """Warm up plans, recipes and caches with the first readable input. A server that cannot read files is noted."""
        for index in left:
            try:
                self.meter.reference(self.inputs[index])
            except Exception:  # reported with its own request
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
                except Exception as error:  # fails this request only; the others continue
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

    def _observed(self, sweep_input: NamedInput) -> Observed:
        way = way_of(self.ways)
        try:
            seen: Answer | Exception = self.meter.observe(way, sweep_input, self.observers)
        except (*CONNECTION_ERRORS, HookRefused):
            raise
        except Exception as error:  # fails this request only
            seen = error
        self.on_step(f"{sweep_input.name}: observers")
        return kept(way, seen)
