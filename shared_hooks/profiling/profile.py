"""What a profile holds. One is made on each side; a plan is made of two.

Times are nanoseconds, sizes bytes, energies joules (`Reading`), powers watts. `profile_file` writes and
reads it as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shared_hooks.metrics import Reading, TensorShape
from shared_hooks.profiling.quartiles import Quartiles
from shared_hooks.showing import Bar, bars, duration, html_table, panel, short, size, summary_of

Side = Literal["edge", "cloud"]
INPUT_CUT = -1
"""`CutProfile.layer_id` of the cut before the first layer, whose name is "input"."""


@dataclass(frozen=True)
class ModelIdentity:
    """What a profile is of; compared before it is used. Digests are hexadecimal, as in the handshake."""

    model_id: str
    weights_hash: str
    structure_digest: str
    plan_digest: str
    depth: int | None = None


@short
@dataclass(frozen=True)
class LayerProfile:
    """One layer call in whole forwards."""

    layer_id: int
    name: str
    layer_type: str
    outputs: tuple[TensorShape, ...]
    output_bytes: int
    frontier_bytes: int | None
    can_split: bool
    reason: str
    inference_ns: Quartiles
    cpu_ns: Quartiles | None
    energy: Reading
    mean_power: Reading
    memory_allocated: Reading
    memory_peak: Reading
    features: Mapping[str, float] = field(default_factory=dict)
    """What its time may depend on, for models fitted on profiles: input_elements, output_elements, parameters, macs."""


@dataclass(frozen=True)
class CodecProfile:
    """A cut's frontier with another codec than the stages are of. ``ns``: on the edge to encode it, on the cloud to
    decode it; ``wire_bytes``: header and payload.
    """

    wire_bytes: int
    ns: Quartiles


@short
@dataclass(frozen=True)
class CutProfile:
    """One cut as this side sees it. The edge's stages: ``head``, ``encode``. The cloud's: ``decode``, ``inject``,
    ``compute``, ``encode``.
    """

    layer_id: int
    name: str
    frontier_bytes: int
    wire_bytes: int
    """Header and payload of the request, encoded."""
    stages: Mapping[str, Quartiles]
    energy: Reading
    """Joules of the edge's head and encoding, or the cloud's tail."""
    memory_peak: Reading
    estimated: str = ""
    """How the stages were estimated; empty when this cut itself was measured."""
    cpu_ns: Quartiles | None = None
    """Processor time of all threads over the stages: what a CPU quota is charged with. None when not measured."""
    codecs: Mapping[str, CodecProfile] = field(default_factory=dict)
    """By name, those that were measured beside the one of the stages; "basis" only where there are books for the cut.
    """


@dataclass(frozen=True)
class FileInput:
    """A real input file as it came (PNG, JPEG, ...), for the candidate that sends it unread."""

    name: str
    suffix: str
    nbytes: int
    prepare_ns: Quartiles
    """Reading and preprocessing it on this side."""


@dataclass(frozen=True)
class Profile:
    """One side of one model on one machine."""

    side: Side
    model: ModelIdentity
    machine: Mapping[str, Any]
    """See `machine.describe`: its ``id`` names the machine, and ``name`` is for people."""
    created: str
    """ISO 8601, UTC."""
    settings: Mapping[str, Any]
    """device, threads, warmup, repetitions, seconds, codec, pause, metrics (whether cuts ran with layer metrics),
    codecs (measured beside).
    """
    whole_ns: Quartiles
    outside_ns: Quartiles
    """The part of the whole forward that no layer accounts for."""
    layers: tuple[LayerProfile, ...]
    cuts: tuple[CutProfile, ...]
    """Every cut that the plan allows, "input" (-1) first."""
    whole_energy: Reading
    idle_power: Reading
    whole_memory_peak: Reading
    weights_bytes: int
    answer_bytes: int
    """Header and payload of the answer."""
    files: tuple[FileInput, ...] = ()
    bare_ns: Quartiles | None = None
    """A whole forward as a request runs it: without layer metrics unless ``settings`` say so. None: as `whole_ns`."""
    finish_ns: Quartiles | None = None
    """The edge's: an answer's bytes to tensors."""
    warnings: tuple[str, ...] = ()
    """For people: what makes the times unlike those of a machine at rest."""

    def __repr__(self) -> str:
        whole = f"whole forward {duration(self.whole_ns.middle)}"
        where = f"on {self.machine.get('name')}"
        counts = f"{len(self.layers)} layers", f"{len(self.cuts)} cuts"
        return summary_of(
            self, self.side, self.model.model_id, where, *counts, whole, f"weights {size(self.weights_bytes)}"
        )

    def _repr_html_(self) -> str:
        rows = [
            (str(one.layer_id), one.name, one.layer_type, duration(one.inference_ns.middle), size(one.output_bytes))
            for one in self.layers
        ]
        drawn = [
            Bar(one.inference_ns.middle, f"{one.layer_id} {one.name}: {duration(one.inference_ns.middle)}")
            for one in self.layers
        ]
        title = f"{self.model.model_id} on the {self.side}, {self.machine.get('name')}"
        title += f": a whole forward takes {duration(self.whole_ns.middle)}"
        label = f"time of each layer, at most {duration(max((bar.value for bar in drawn), default=0.0))}"
        return panel(title, bars(drawn, label), html_table(("id", "name", "type", "time", "output"), rows, (0, 3, 4)))

    @property
    def alone_ns(self) -> Quartiles:
        """The whole model on this side alone, as a request runs it."""
        return self.bare_ns or self.whole_ns

    def cut(self, layer_id: int) -> CutProfile | None:
        """The cut after ``layer_id``; None where the plan allows none."""
        return next((cut for cut in self.cuts if cut.layer_id == layer_id), None)
