"""Layers by regression instead of measurement: for a model of which only the layers' figures are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from edge_client.planning.candidate import Candidate
from edge_client.planning.objective import Decision, decide
from edge_client.planning.partitioners.layer_model import LayerModel
from edge_client.planning.partitioners.partitioner import Situation
from shared_hooks.errors import SpecError
from shared_hooks.profiling import profile_file
from shared_hooks.profiling.profile import INPUT_CUT, CutProfile, Profile, Side


class Regression:
    """``option``: profile files, comma-separated, to fit on (several models' if you like); "strict" among them refuses
    layer types without a model. Without files it fits on the two profiles at hand, and only shows what it is worth.

    The edge's and the tail's times are the sums of the layers' predicted times; what a cut costs besides (encoding, the
    link, the queue) stays as it was. Every candidate's notes tell the error on layers left out of the fit.
    """

    about = (
        "layer times by regression on each type's figures (Neurosurgeon), fitted on --partitioner-option PROFILE,..."
    )

    def decide(self, situation: Situation) -> Decision:
        if situation.edge is None or situation.cloud is None:
            raise SpecError("partitioner regression: needs the layers of both profiles")
        words = [word.strip() for word in (situation.option or "").split(",") if word.strip()]
        strict, paths = "strict" in words, [word for word in words if word != "strict"]
        edge = _times(situation.edge, _fit("edge", paths, situation.edge), strict)
        cloud = _times(situation.cloud, _fit("cloud", paths, situation.cloud), strict)
        around = {cut.layer_id: _around(cut) for cut in situation.cloud.cuts}
        candidates = [_again(one, edge, cloud, around) for one in situation.candidates]
        return decide(candidates, situation.objective, situation.constraints)


def _fit(side: Side, paths: Sequence[str], own: Profile) -> LayerModel:
    found = []
    for path in paths:
        try:
            profile = profile_file.read(path, side)
        except SpecError:
            profile = profile_file.read(path)  # a file of the other side alone is no error; one that is no profile is
        if profile.side == side:
            found.append(profile)
    if paths and not found:
        raise SpecError(f"partitioner regression: none of the files holds a profile of the {side}")
    return LayerModel.fit(found or [own])


class _Times:
    """Predicted nanoseconds by layer id, in order, and what to say of them."""

    def __init__(self, layers: dict[int, float], outside: float, note: str) -> None:
        self.layers, self.outside, self.note = layers, outside, note

    @property
    def whole(self) -> float:
        return sum(self.layers.values()) + self.outside

    def until(self, layer_id: int) -> float:
        """The head's: its layers, and its share of what lies outside layers."""
        inside = sum(ns for at, ns in self.layers.items() if at <= layer_id)
        total = sum(self.layers.values())
        return inside + (self.outside * inside / total if total else 0.0)


def _times(profile: Profile, model: LayerModel, strict: bool) -> _Times:
    leaves = _leaves(profile)
    layers = {at: model.ns(kind, features, strict) for at, kind, features in leaves}
    unknown = sorted({kind for _, kind, _ in leaves if kind not in model.fits})
    errors = ", ".join(f"{fit.layer_type} {fit.error:.0%}" for fit in model.fits.values())
    general = f"; by the general model ({model.general.error:.0%}): {', '.join(unknown)}" if unknown else ""
    return _Times(
        layers, profile.outside_ns.median, f"{profile.side} by regression, error: {errors or 'none'}{general}"
    )


def _leaves(profile: Profile) -> list[tuple[int, str, dict[str, float]]]:
    """Layers that hold no other: a container's time would count twice."""
    names = [layer.name.partition("#")[0] for layer in profile.layers]
    return [
        (layer.layer_id, layer.layer_type, dict(layer.features))
        for layer, name in zip(profile.layers, names, strict=True)
        if not any(other.startswith(f"{name}.") for other in names) and name
    ]


def _around(cut: CutProfile) -> float:
    """What the server does for a tail besides its layers: decode, inject, encode."""
    return sum(stage.middle for name, stage in cut.stages.items() if name != "compute")


def _again(one: Candidate, edge: _Times, cloud: _Times, around: Mapping[int, float]) -> Candidate:
    stages = dict(one.stages_ns)
    if one.layer_id is None:
        stages["edge"] = edge.whole
    elif "edge" in stages:
        stages["edge"] = edge.until(one.layer_id) if one.layer_id != INPUT_CUT else stages["edge"]
        stages["tail"] = cloud.whole - cloud.until(one.layer_id) + around.get(one.layer_id, 0.0)
    return replace(one, stages_ns=stages, quartiles_ns=None, notes=(*one.notes, edge.note, cloud.note))
