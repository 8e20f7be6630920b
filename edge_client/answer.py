"""What `EdgeClient` gives back: an answer, or a failure in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from edge_client.call import Load
from edge_client.transport import PartReport, Times
from edge_client.witness import Witness
from shared_hooks import LayerMetrics
from shared_hooks.metrics import ForwardMetrics
from shared_hooks.models import Prediction
from shared_hooks.observers.named import Observations
from shared_hooks.showing import brief, duration, html_table, panel, short, size, strip, summary_of

_UNKNOWN: Final = object()
_SHOWN: Final = 10
"""The number of predictions shown in a notebook."""


@dataclass(frozen=True, slots=True, repr=False)
class Answer:
    """The model's output for one input, and what it took."""

    output: Any  # in the model's own structure, tensors on the CPU
    request_id: int
    split: str  # name of the layer after which the model was cut; "input": before the first; or a mode without a cut
    layer_id: int | None  # ... its id; -1 for "input" and for an input file; None for "edge-only"
    times: Times  # rows that add up to `measured_ns`
    layers_edge: Sequence[LayerMetrics]
    layers_cloud: Sequence[LayerMetrics]  # of a chain: the first server's, then those of `parts`
    bytes_up: int  # header and payload of one sending, without the framing of the wire
    bytes_down: int
    sends: int  # 1, and one more for each retry
    measured_ns: int  # from the call to the decoded answer, by two readings of one clock, without the time of witnesses
    finished_ns: int  # the second reading, from which measuring continues (`times.now_ns`); with a witness, after it
    load: Load | None = None  # how busy the server was; None without a server, or if it does not report it
    forward_edge: ForwardMetrics | None = None  # each side's forward as a whole; None without metrics
    forward_cloud: ForwardMetrics | None = None
    observations: Mapping[str, Observations] = field(default_factory=dict)  # "edge", "cloud": what observers found
    transforms: Sequence[str] = ()  # modules whose output is changed: the edge's, then the cloud's
    compiled: bool = False  # whether the server used a tail compiled by torch.compile: last bits may differ
    batch_size: int = 1  # requests (or steps) that the server computed in one batch; 1: exact, as the model computes it
    fallback: str = ""  # why it was answered on the edge although it was to be split; otherwise empty
    witness: Witness | None = None  # the comparison with the whole model here; None: not compared
    parts: Sequence[PartReport] = ()  # of a chain: the servers after the first one, in order
    codecs: Sequence[str] = ()  # the codec of each tensor of the frontier, by name; empty without a cut
    postprocess: Callable[[Any], Any] | None = field(default=None, compare=False)  # computes `result` from `output`
    _result: Any = field(default=_UNKNOWN, init=False, compare=False)

    @property
    def result(self) -> Any:
        """What the model's spec makes of `output`: a list of `Prediction`, best first, or what its own code returns.

        `output` itself where the spec says nothing and there are no class scores in it, and with
        ``EdgeClient(postprocess=False)``. Worked out when it is first asked for. Raises SpecError, InputMismatch.
        """
        if self._result is _UNKNOWN:
            result = self.output if self.postprocess is None else self.postprocess(self.output)
            object.__setattr__(self, "_result", result)
        return self._result

    def __repr__(self) -> str:
        where = f"split={self.split!r}" + (f" ({self.fallback})" if self.fallback else "")
        where += "".join(f" > {part.split!r}" for part in self.parts)
        where += f" {'+'.join(dict.fromkeys(self.codecs))}" if set(self.codecs) - {"raw"} else ""
        times = self.times
        parts = {"edge": times.edge_compute}
        if self.layer_id is not None:
            parts |= {"network": times.network, "server": times.server}
        parts["other"] = max(0, self.measured_ns - sum(parts.values()))  # preparing, planning, waiting, encoding
        took = f"{duration(self.measured_ns)}: " + " + ".join(f"{name} {duration(ns)}" for name, ns in parts.items())
        sent = f"{size(self.bytes_up)} up, {size(self.bytes_down)} down" if self.layer_id is not None else ""
        made = f"in a batch of {self.batch_size} requests: not exact" if self.batch_size > 1 else ""
        return summary_of(self, f"output={brief(self.output)}", where, took, sent, made, self._best())

    def _best(self) -> str:
        found = self._result_for_json()
        return f"best {brief(found[0].label)} {found[0].score:.4f}" if found else ""

    def _result_for_json(self) -> list[Prediction]:
        """Predictions; empty if the result is something else, or the spec's own code fails."""
        try:
            result = self.result
        except Exception:
            return []
        return [one for one in result[:_SHOWN] if isinstance(one, Prediction)] if isinstance(result, list) else []

    def _parts(self) -> list[tuple[str, int]]:
        """Return the rows of `times`, combined for a small picture."""
        times = self.times
        known = {
            "edge compute": times.edge_compute,
            "network": times.network,
            "server queue": times.server_queue,
            "server": times.server - times.server_queue,
            "waiting on the edge": times.wait + times.send_wait + times.turn + times.retry,
        }
        return [*known.items(), ("rest of the edge", times.end_to_end - sum(known.values()))]

    def _repr_html_(self) -> str:
        rows = [(name, float(ns)) for name, ns in self._parts() if ns > 0]
        sent = f", {size(self.bytes_up)} up, {size(self.bytes_down)} down" if self.layer_id is not None else ""
        found = [(str(one.row), one.label, f"{one.score:.4f}") for one in self._result_for_json()]
        return panel(
            f"answer to request {self.request_id}, split={self.split!r}: {duration(self.measured_ns)}{sent}",
            strip(rows, f"where {duration(self.times.end_to_end)} went", [duration(ns) for _, ns in rows]),
            html_table(("row", "label", "score"), found, (0, 2)) if found else "",
            html_table(("output",), [(brief(self.output, 160),)]),
        )

    def __reduce__(self) -> Any:
        # the postprocessing may be the user's code, which is not pickled: its result is
        names = [one.name for one in fields(self) if one.init and one.name != "postprocess"]
        return _answer_of, ({name: getattr(self, name) for name in names}, self.result)


def _answer_of(known: dict[str, Any], result: Any) -> Answer:
    answer = Answer(**known)
    object.__setattr__(answer, "_result", result)
    return answer


@short
@dataclass(frozen=True, slots=True)
class Failure:
    """Takes the place of an answer: input number ``index`` (from 0) failed with ``error``."""

    index: int
    item: Any
    error: Exception
