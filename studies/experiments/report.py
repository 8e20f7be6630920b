"""The experiments' results as text, and their numbers short enough to be kept."""

from __future__ import annotations

import json
from typing import Any


def text(name: str, found: dict[str, Any]) -> str:
    """A table for people."""
    return prediction(found) if name == "prediction" else trace(found)


def prediction(found: dict[str, Any]) -> str:
    """One line per model and link, and one for all."""
    lines = ["model      Mbit/s  candidates  median error  90 % below  chosen -> best (slower by)"]
    for run in found["runs"]:
        numbers = f"{len(run['candidates']):10}  {run['median_error']:12.1%}  {run['ninth_decile_error']:10.1%}"
        chosen = f"{run['predicted_best']} -> {run['measured_best']} ({run['regret']:.1%})"
        lines.append(f"{run['model']:10} {run['mbits']:6g}  {numbers}  {chosen}")
    whole = found["summary"]
    stages = ", ".join(f"{stage} {value:.1%}" for stage, value in whole["stage_errors"].items())
    lines += [
        f"all: {whole['candidates']} candidates, {whole['requests']} requests; "
        f"median error {whole['median_error']:.1%}, 90 % below {whole['ninth_decile_error']:.1%}, "
        f"worst {whole['worst_error']:.1%}; the chosen one is at most {whole['worst_regret']:.1%} slower than the best",
        f"by stage, median |predicted - measured| in per cent of the latency: {stages}",
    ]
    return "\n".join(lines)


def trace(found: dict[str, Any]) -> str:
    """One line per phase, and one for each case."""
    lines = []
    for case in found["cases"]:
        lines.append(
            f"{case['case']}: phase, requests, mean ms, oracle ms (its candidate), ratio, settled after, moves after"
        )
        for one in case["phases"]:
            ratio = "-" if one["ratio"] is None else f"{one['ratio']:.3f}"
            lines.append(
                f"  {one['name']:17} {one['requests']:4}  {one['mean_ms'] or 0:6.1f}  {one['oracle_ms']:6.1f} "
                f"({one['oracle']})  {ratio}  {one['settled_after_s']:.2f} s  {one['moves_after_settling']}"
            )
        lines.append(
            f"  all: {case['requests']} requests, {case['lost']} lost, {case['wrong']} not exact; mean "
            f"{case['mean_ms']:.1f} ms against {case['oracle_mean_ms']:.1f} ms, ratio {case['ratio']:.3f}; settled "
            f"after {case['slowest_adaptation_s']:.2f} s at most, {case['most_moves_after_settling']} moves after that"
        )
    if "ways" in found:
        lines += _ways(found)
    return "\n".join(lines)


def _ways(found: dict[str, Any]) -> list[str]:
    """What a turn of each way took, beside the first one's, and what moves beside what stays."""
    lines = ["mean ms of each turn's trace (of the first way's):"]
    first = next(iter(found["ways"].values()))
    for name, means in found["ways"].items():
        turns = ", ".join(f"{ms:.1f} ({ms / beside:.3f})" for ms, beside in zip(means, first, strict=True))
        lines.append(f"  {name:12} {turns}")
    fixed = found["fixed"]
    stays = fixed["means_ms"][fixed["candidate"]]
    turns = ", ".join(f"{a:.1f} against {b:.1f}" for a, b in zip(fixed["moving_ms"], stays, strict=True))
    ratio = sum(fixed["moving_ms"]) / sum(stays)
    lines.append(f"phases with a server, the last way against {fixed['candidate']} throughout: {turns}; {ratio:.3f}")
    return lines


def kept(found: dict[str, Any]) -> str:
    """As JSON, one line for each run or case."""
    parts = {key: json.dumps(rounded(value)) for key, value in found.items() if key not in ("runs", "cases")}
    for key in ("runs", "cases"):
        if key in found:
            lines = ",\n  ".join(json.dumps(rounded(one), separators=(",", ":")) for one in found[key])
            parts[key] = f"[\n  {lines}\n ]"
    return "{\n" + ",\n".join(f' "{key}": {text}' for key, text in parts.items()) + "\n}\n"


def rounded(value: Any, digits: int = 4) -> Any:
    """Floats to so many significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item, digits) for item in value]
    return value
