"""Decoding profiles as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal

from shared_hooks.errors import SpecError
from shared_hooks.profiling.decoding.line import Line
from shared_hooks.profiling.decoding.profile import DecodingProfile, Part
from shared_hooks.profiling.fields import Fields

FORMAT: Final = "isthmus-decoding-profile"
VERSION: Final = 1
MAX_BYTES: Final = 16 << 20
LEAST: Final = -1e15
"""What is left of a measurement when others are taken off may be a little below 0."""
SIDES: Final = ("edge", "cloud")


def to_json(profile: DecodingProfile) -> dict[str, Any]:
    """JSON-able."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "side": profile.side,
        "model_id": profile.model_id,
        "machine": dict(profile.machine),
        "before": _part(profile.before),
        "blocks": [_part(block) for block in profile.blocks],
        "after": _part(profile.after),
        "words": profile.words,
        "word_bytes": profile.word_bytes,
        "lengths": list(profile.lengths),
        "note": profile.note,
    }


def from_json(data: object, origin: str = "profile") -> DecodingProfile:
    """The reverse. Raises SpecError that names the place and what is wrong there."""
    top = Fields(data, origin)
    if top.data.get("format") != FORMAT:
        raise SpecError(f'{origin}: no decoding profile: "format" is not "{FORMAT}"')
    if top.data.get("version") != VERSION:
        raise SpecError(f"{origin}.version: this Isthmus reads {VERSION}, found {top.data.get('version')!r:.40}")
    side: Literal["edge", "cloud"] = "edge" if top.choice("side", SIDES) == "edge" else "cloud"
    blocks = top.of("blocks", list, "a list")
    if not blocks:
        top.fail("blocks", "expected one at least")
    lengths = top.of("lengths", list, "a list")
    if not all(type(one) is int and one > 0 for one in lengths):
        top.fail("lengths", "expected whole numbers above 0")
    return DecodingProfile(
        side,
        top.text("model_id"),
        top.inner("machine").data,
        _read_part(top.inner("before")),
        tuple(_read_part(Fields(one, f"{top.place}.blocks[{at}]")) for at, one in enumerate(blocks)),
        _read_part(top.inner("after")),
        top.whole("words"),
        top.whole("word_bytes"),
        tuple(lengths),
        top.text("note"),
    )


def read(path: str | Path) -> DecodingProfile:
    """From a file. Raises SpecError."""
    try:
        if Path(path).stat().st_size > MAX_BYTES:
            raise SpecError(f"{path}: larger than any decoding profile ({MAX_BYTES} bytes)")
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path} is not JSON: {error}") from error
    return from_json(data, str(path))


def write(profile: DecodingProfile, path: str | Path) -> None:
    """As a file. Raises SpecError where it cannot be written."""
    try:
        Path(path).write_text(json.dumps(to_json(profile), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror}") from error


def _part(part: Part) -> dict[str, Any]:
    return {
        "name": part.name,
        "step_ns": _line(part.step),
        "prefill_ns": _line(part.prefill),
        "weights_bytes": part.weights_bytes,
        "state_bytes": _line(part.state_bytes),
        "hidden_bytes": part.hidden_bytes,
    }


def _line(line: Line) -> dict[str, float]:
    return {"fixed": line.fixed, "per_token": line.slope}


def _read_part(fields: Fields) -> Part:
    return Part(
        fields.text("name"),
        _read_line(fields.inner("step_ns")),
        _read_line(fields.inner("prefill_ns")),
        fields.whole("weights_bytes"),
        _read_line(fields.inner("state_bytes")),
        fields.whole("hidden_bytes"),
    )


def _read_line(fields: Fields) -> Line:
    return Line(fields.number("fixed", LEAST), fields.number("per_token", LEAST))
