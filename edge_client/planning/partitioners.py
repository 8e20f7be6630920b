"""Find partitioners by name, which choose the cut. Others are ``module:Class``, or entry points of
"isthmus.partitioners".

Defines the interface, a partitioner's input, and the built-in ones: most pick a predicted candidate; `Regression`
predicts layer times from the layers' features, for a model of which only these are known.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from edge_client.planning.objective import Candidate, Constraints, Decision, Objective, decide
from edge_client.user_text import option
from shared_hooks.config import looks_like_target, raised, resolve
from shared_hooks.errors import IsthmusError, SpecError, near, near_path
from shared_hooks.modules import call_parts
from shared_hooks.profiling import profile as profiles
from shared_hooks.profiling.profile import INPUT_CUT, CutProfile, LayerProfile, Profile, Side


@dataclass(frozen=True)
class Situation:
    """A partitioner's input. ``candidates`` are predicted from the two profiles, the link and the load; ``option`` is
    the partitioner's own option from the command line.
    """

    candidates: Sequence[Candidate]
    objective: Objective = field(default_factory=Objective)
    constraints: Constraints = field(default_factory=Constraints)
    edge: Profile | None = None
    cloud: Profile | None = None
    option: str | None = None


class Partitioner(Protocol):
    """Interface of partitioners. Created once without arguments and called repeatedly, so it may keep state."""

    about: str
    """One line for people."""

    def decide(self, situation: Situation) -> Decision:
        """Decide. Raises SpecError naming what is missing."""


class ByObjective:
    """Picks the best candidate by the requested objective, or by one of its own."""

    def __init__(self, about: str = "the best in --objective (the default)", own: Objective | None = None) -> None:
        self.about, self.own = about, own

    def decide(self, situation: Situation) -> Decision:
        return decide(situation.candidates, self.own or situation.objective, situation.constraints)


class Cycle:
    """Picks candidates in turn, in the order of the layers."""

    about = "each allowed candidate in turn, for experiments"

    def __init__(self) -> None:
        self._turn = 0

    def decide(self, situation: Situation) -> Decision:
        situation = _with_unsteady(situation)
        decision = ByObjective().decide(situation)
        allowed = [one for one in situation.candidates if one.key not in decision.rejected]
        pick = allowed[self._turn % len(allowed)]
        self._turn += 1
        return chosen(decision, pick, "cycle")


class Fixed:
    """Picks the candidate of ``option``: its key or name, or its layer's id."""

    about = "the candidate that --partitioner-option names"

    def decide(self, situation: Situation) -> Decision:
        wanted = situation.option
        if wanted is None:
            raise SpecError(f"partitioner fixed: name the candidate with {option('partitioner_option')}")
        situation = _with_unsteady(situation)
        meant = [
            [one for one in situation.candidates if wanted == word(one)]
            for word in (lambda one: one.key, lambda one: one.name, lambda one: str(one.layer_id))
        ]
        found = next((ones for ones in meant if ones), None)
        if found is None:
            names = [one.key for one in situation.candidates]
            raise SpecError(f"partitioner fixed: no candidate {wanted!r}.{near_path(wanted, names)}")
        decision = ByObjective().decide(situation)
        pick = next((one for one in decision.ranking if one in found), None)  # the best of several codecs
        if pick is None:
            raise SpecError(f"partitioner fixed: {found[0].key} is not allowed: {decision.rejected[found[0].key]}")
        return chosen(decision, pick, "fixed")


def _with_unsteady(situation: Situation) -> Situation:
    """Return the situation for a choice that is not by predictions: candidates with unsteady measurements are
    included.
    """
    return replace(situation, candidates=[replace(one, unsteady="") for one in situation.candidates])


def chosen(decision: Decision, winner: Candidate, by: str) -> Decision:
    """Return a decision for the winner picked by a partitioner named ``by``; the best of the others is the
    runner-up.
    """
    others = tuple(one for one in decision.ranking if one.key != winner.key)
    return replace(
        decision,
        objective=f"{by} ({decision.objective})",
        winner=winner,
        runner_up=others[0] if others else None,
        ranking=(winner, *others),
    )


# How long a layer takes, from what it is: models fitted on profiles, one for each type of layer (Neurosurgeon, ASPLOS
# 2017, section 4.2: linear or logarithmic regression on a type's own figures).
#
#     linear       t = a + b * macs + c * (input + output elements)
#     logarithmic  log t = a + b * log(1 + macs) + c * log(1 + input + output elements)
#
# Both are fitted to the relative error; of each type the one with the smaller error on layers left out is kept. A
# type with fewer than `LEAST` measured layers, or one never seen, has no model of its own: it gets the general one,
# fitted on layers of all types, or is refused.

LEAST: Final = 5
Kind = Literal["linear", "logarithmic"]
KINDS: Final[tuple[Kind, ...]] = ("linear", "logarithmic")
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Fit:
    """The model of one layer type. ``error``: median relative error of each layer predicted by a model fitted without
    it.
    """

    layer_type: str
    kind: Kind
    coefficients: tuple[float, ...]
    layers: int
    error: float
    shortest_ns: float

    def ns(self, features: Mapping[str, float]) -> float:
        """Return nanoseconds, at least a tenth of the shortest layer in the fit."""
        value = float(_figures(features, self.kind) @ np.array(self.coefficients))
        if self.kind == "logarithmic":
            value = float(np.exp(min(value, 60.0)))
        return max(value, self.shortest_ns / 10)

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        return {"type": self.layer_type, "kind": self.kind, "layers": self.layers, "error": self.error}


@dataclass(frozen=True)
class LayerModel:
    """Models of layer times; ``general`` is of all types together."""

    fits: Mapping[str, Fit]
    general: Fit

    @classmethod
    def fit(cls, measured: Sequence[Profile]) -> LayerModel:
        """Fit models. Raises SpecError for too few layers with features, or profiles of both sides."""
        if len({profile.side for profile in measured}) > 1:
            raise SpecError("a layer model is of one side: profiles of the edge and of the cloud do not mix")
        layers = [layer for profile in measured for layer in profile.layers if layer.features]
        if len(layers) < LEAST:
            raise SpecError(f"a layer model needs {LEAST} measured layers or more, there are {len(layers)}")
        types: dict[str, list[LayerProfile]] = {}
        for layer in layers:
            types.setdefault(layer.layer_type, []).append(layer)
        fits = {name: _best(name, seen) for name, seen in types.items() if len(seen) >= LEAST}
        return cls(fits, _best("all types", layers))

    def ns(self, layer_type: str, features: Mapping[str, float], strict: bool = False) -> float:
        """Return nanoseconds. ``strict``: raise SpecError for a type without a model, instead of using the
        general one.
        """
        fit = self.fits.get(layer_type)
        if fit is None:
            if strict:
                raise SpecError(f"no model of {layer_type} layers: known are {', '.join(sorted(self.fits)) or 'none'}")
            fit = self.general
        return fit.ns(features)


def _figures(features: Mapping[str, float], kind: Kind) -> Numbers:
    macs = float(features.get("macs", 0.0))
    elements = float(features.get("input_elements", 0.0)) + float(features.get("output_elements", 0.0))
    if kind == "logarithmic":
        return np.array([1.0, np.log1p(macs), np.log1p(elements)])
    return np.array([1.0, macs, elements])


def _best(name: str, layers: Sequence[LayerProfile]) -> Fit:
    times = np.array([max(1.0, layer.inference_ns.median) for layer in layers])
    fits = []
    for kind in KINDS:
        figures = np.array([_figures(layer.features, kind) for layer in layers])
        errors = []
        for left_out in range(len(layers)):
            kept = np.arange(len(layers)) != left_out
            trial = Fit(
                name, kind, _solve(figures[kept], times[kept], kind), len(layers), 0.0, float(times[kept].min())
            )
            errors.append(abs(trial.ns(layers[left_out].features) / times[left_out] - 1))
        coefficients = _solve(figures, times, kind)
        fits.append(Fit(name, kind, coefficients, len(layers), statistics.median(errors), float(times.min())))
    return min(fits, key=lambda fit: fit.error)


def _solve(figures: Numbers, times: Numbers, kind: Kind) -> tuple[float, ...]:
    """Return least squares of the relative error; columns are scaled, and for constant features the norm is minimal."""
    if kind == "logarithmic":
        rows, goal = figures, np.log(times)
    else:
        rows, goal = figures / times[:, None], np.ones(len(times))
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    solution = np.linalg.lstsq(rows / scale, goal, rcond=1e-9)[0] / scale
    return tuple(float(value) for value in solution)


class Regression:
    """``option``: profile files to fit on, comma-separated (of several models, if you like); "strict" among them
    refuses layer types without a model. Without files it fits on the two profiles at hand, which only shows its
    accuracy.

    The edge's and the tail's times are the sums of the layers' predicted times; other costs of a cut (encoding, the
    link, the queue) are unchanged. Every candidate's notes give the error on layers left out of the fit.
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
        around = {cut.name: _around(cut) for cut in situation.cloud.cuts}
        candidates = [_again(one, edge, cloud, around) for one in situation.candidates]
        return decide(candidates, situation.objective, situation.constraints)


def _fit(side: Side, paths: Sequence[str], own: Profile) -> LayerModel:
    found = []
    for path in paths:
        try:
            profile = profiles.read(path, side)
        except SpecError:
            profile = profiles.read(path)  # a missing file of the other side is no error; a file that is no profile is
        if profile.side == side:
            found.append(profile)
    if paths and not found:
        raise SpecError(f"partitioner regression: none of the files holds a profile of the {side}")
    return LayerModel.fit(found or [own])


class _Times:
    """Predicted nanoseconds by layer id, in order, and notes."""

    def __init__(self, layers: dict[int, float], outside: float, note: str) -> None:
        self.layers, self.outside, self.note = layers, outside, note

    @property
    def whole(self) -> float:
        return sum(self.layers.values()) + self.outside

    def until(self, layer_id: int) -> float:
        """Return the head's time: its layers, and its share of what lies outside layers."""
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
    """Return layers that contain no other, as a container's time would count twice."""
    names = [call_parts(layer.name)[0] for layer in profile.layers]
    return [
        (layer.layer_id, layer.layer_type, dict(layer.features))
        for layer, name in zip(profile.layers, names, strict=True)
        if not any(other.startswith(f"{name}.") for other in names) and name
    ]


def _around(cut: CutProfile) -> float:
    """Return the server's time for a tail beside its layers: decode, inject, encode."""
    return sum(stage.middle for name, stage in cut.stages.items() if name != "compute")


def _again(one: Candidate, edge: _Times, cloud: _Times, around: Mapping[str, float]) -> Candidate:
    stages = dict(one.stages_ns)
    if one.layer_id is None:
        stages["edge"] = edge.whole
    elif "edge" in stages:
        stages["edge"] = edge.until(one.layer_id) if one.layer_id != INPUT_CUT else stages["edge"]
        stages["tail"] = (
            cloud.whole
            - cloud.until(one.layer_id)
            + around.get("input" if one.layer_id == INPUT_CUT else one.name, 0.0)
        )
    return replace(one, stages_ns=stages, interval_ns=None, notes=(*one.notes, edge.note, cloud.note))


GROUP: Final = "isthmus.partitioners"
BUILT_IN: Final[Mapping[str, Callable[[], Partitioner]]] = {
    "objective": ByObjective,
    "latency": lambda: ByObjective("the lowest predicted latency", Objective({"latency": 1.0})),
    "energy": lambda: ByObjective("the lowest predicted energy on the edge", Objective({"energy": 1.0})),
    "cycle": Cycle,
    "fixed": Fixed,
    "regression": Regression,
}


def partitioners() -> dict[str, str]:
    """Return name -> description, without loading plugins."""
    known = {name: make().about for name, make in BUILT_IN.items()}
    return {**{name: f"plugged in: {one.value}" for name, one in _plugged().items()}, **known}


def find_partitioner(name: str) -> Partitioner:
    """Return a new partitioner. ``module:Class`` or an entry point is called without arguments; ``module`` may be in
    the current folder. An entry point cannot replace a built-in name.

    Raises SpecError for an unknown name and for one that cannot be loaded; later, from ``decide``, for a plugin's
    exceptions and invalid decisions.
    """
    where = option("partitioner", name)
    if name in BUILT_IN:
        return BUILT_IN[name]()
    plugged = _plugged().get(name)
    if plugged is None and not looks_like_target(name):
        known = f"{', '.join(partitioners())}, and module:Class of your own"
        raise SpecError(f"{where}: no such partitioner; there are {known}.{near(name, partitioners())}")
    target = name if plugged is None else plugged.value
    try:
        made = resolve(name, Path.cwd(), where)() if plugged is None else plugged.load()()
    except SpecError:
        raise
    except Exception as error:
        raise SpecError(f"{where}: {target} raised {raised(error)}") from error
    if not callable(getattr(made, "decide", None)):
        raise SpecError(f"{where}: {target} has no decide(situation)")
    return _Foreign(made, target)


class _Foreign:
    """A plugin's partitioner, whose errors are reported as its own."""

    def __init__(self, inner: Partitioner, target: str) -> None:
        self._inner, self._target = inner, target
        self.about = str(getattr(inner, "about", target))

    def decide(self, situation: Situation) -> Decision:
        try:
            decision: object = self._inner.decide(situation)
        except IsthmusError:
            raise
        except Exception as error:
            raise SpecError(f"the partitioner {self._target} raised {raised(error)}") from error
        if not isinstance(decision, Decision):
            what = f"a {type(decision).__name__}, and no Decision (edge_client.planning.objective.decide makes one)"
            raise SpecError(f"the partitioner {self._target} returned {what}")
        return decision


def _plugged() -> dict[str, EntryPoint]:
    return {one.name: one for one in entry_points(group=GROUP)}
