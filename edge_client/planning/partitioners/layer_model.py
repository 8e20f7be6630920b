"""How long a layer takes, from what it is: models fitted on profiles, one for each type of layer (Neurosurgeon, ASPLOS
2017, section 4.2: linear or logarithmic regression on a type's own figures).

    linear       t = a + b * macs + c * (input + output elements)
    logarithmic  log t = a + b * log(1 + macs) + c * log(1 + input + output elements)

Both are fitted to the relative error; of each type the one with the smaller error on layers left out is kept. A type
with fewer than `LEAST` measured layers, or one never seen, has no model of its own: it gets the general one, fitted on
layers of all types, or is refused.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from shared_hooks.errors import SpecError
from shared_hooks.profiling.profile import LayerProfile, Profile

LEAST: Final = 5
Kind = Literal["linear", "logarithmic"]
KINDS: Final[tuple[Kind, ...]] = ("linear", "logarithmic")
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Fit:
    """One type's model. ``error``: median relative error of each layer predicted by a model fitted without it."""

    layer_type: str
    kind: Kind
    coefficients: tuple[float, ...]
    layers: int
    error: float
    shortest_ns: float

    def ns(self, features: Mapping[str, float]) -> float:
        """Nanoseconds; never less than a tenth of the shortest layer that was fitted."""
        value = float(_figures(features, self.kind) @ np.array(self.coefficients))
        if self.kind == "logarithmic":
            value = float(np.exp(min(value, 60.0)))
        return max(value, self.shortest_ns / 10)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"type": self.layer_type, "kind": self.kind, "layers": self.layers, "error": self.error}


@dataclass(frozen=True)
class LayerModel:
    """``general`` is the model of all types together."""

    fits: Mapping[str, Fit]
    general: Fit

    @classmethod
    def fit(cls, profiles: Sequence[Profile]) -> LayerModel:
        """Raises SpecError where there are too few layers with figures, or profiles of both sides."""
        if len({profile.side for profile in profiles}) > 1:
            raise SpecError("a layer model is of one side: profiles of the edge and of the cloud do not mix")
        layers = [layer for profile in profiles for layer in profile.layers if layer.features]
        if len(layers) < LEAST:
            raise SpecError(f"a layer model needs {LEAST} measured layers or more, there are {len(layers)}")
        types: dict[str, list[LayerProfile]] = {}
        for layer in layers:
            types.setdefault(layer.layer_type, []).append(layer)
        fits = {name: _best(name, seen) for name, seen in types.items() if len(seen) >= LEAST}
        return cls(fits, _best("all types", layers))

    def ns(self, layer_type: str, features: Mapping[str, float], strict: bool = False) -> float:
        """Nanoseconds. ``strict``: SpecError naming a type without a model, in place of the general one's answer."""
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
    """Least squares of the relative error; columns are scaled, and where figures do not vary the least norm wins."""
    if kind == "logarithmic":
        rows, goal = figures, np.log(times)
    else:
        rows, goal = figures / times[:, None], np.ones(len(times))
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    solution = np.linalg.lstsq(rows / scale, goal, rcond=1e-9)[0] / scale
    return tuple(float(value) for value in solution)
