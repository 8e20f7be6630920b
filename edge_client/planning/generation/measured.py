"""All that was measured for a plan of a generation: kept as JSON, it answers for other links, lengths and drafts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from edge_client.load import Load
from edge_client.planning.generation.overhead import Overhead
from edge_client.planning.generation.predict import GenerationCandidate, predict_generation
from edge_client.planning.generation.workload import Workload
from edge_client.planning.link import Curve, Link
from edge_client.planning.predict import Power
from shared_hooks.errors import SpecError
from shared_hooks.profiling.decoding import file
from shared_hooks.profiling.decoding.line import Line
from shared_hooks.profiling.decoding.profile import DecodingProfile
from shared_hooks.profiling.fields import Fields
from shared_hooks.showing import short

KEY: Final = "measured"
"""Its place in a plan's JSON."""
_LINES: Final = ("step_up", "prefill_up", "step_down", "prefill_down")


@short
@dataclass(frozen=True)
class Measured:
    """Both sides' profiles, the link, and what real steps took beside these."""

    edge: DecodingProfile
    """By itself."""
    head: DecodingProfile
    """In split steps."""
    cloud: DecodingProfile
    link: Link
    overhead: Overhead = field(default_factory=Overhead)
    load: Load = field(default_factory=Load)

    def candidates(
        self,
        workload: Workload,
        link: Link | None = None,
        edge_factor: float = 1.0,
        server_factor: float = 1.0,
        *,
        power: Power | None = None,
    ) -> list[GenerationCandidate]:
        """What `predict_generation` makes of it; on another ``link``, or with either side's times multiplied."""
        return predict_generation(
            self.edge,
            self.cloud,
            self.link if link is None else link,
            workload,
            head=self.head,
            overhead=self.overhead,
            load=self.load,
            power=power,
            edge_factor=edge_factor,
            server_factor=server_factor,
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "edge": file.to_json(self.edge),
            "head": file.to_json(self.head),
            "cloud": file.to_json(self.cloud),
            "link": self.link.as_dict(),
            "overhead": self.overhead.as_dict(),
            "load": {"pending": self.load.pending, "workers": self.load.workers, "queue_ns": self.load.queue_ns},
        }


def read_measured(path: str | Path) -> Measured:
    """From a plan's JSON. Raises SpecError that names the place."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path} is not JSON: {error}") from error
    top = Fields(data, str(path)).inner(KEY)
    link, overhead, load = top.inner("link"), top.inner("overhead"), top.inner("load")
    lines = [overhead.inner(f"{name}_bytes") for name in _LINES]
    return Measured(
        file.from_json(top.need("edge"), f"{top.place}.edge"),
        file.from_json(top.need("head"), f"{top.place}.head"),
        file.from_json(top.need("cloud"), f"{top.place}.cloud"),
        Link(_curve(link, "up_points"), _curve(link, "down_points"), f"{link.text('source')}, kept in a file"),
        Overhead(
            overhead.number("network_ns", file.LEAST),
            *(Line(one.number("fixed"), one.number("per_token")) for one in lines),
        ),
        Load(load.whole("pending"), load.whole("workers"), load.number("queue_ns")),
    )


def _curve(fields: Fields, key: str) -> Curve:
    try:
        return Curve(tuple((int(size), float(ns)) for size, ns in fields.of(key, list, "a list of [bytes, ns]")))
    except (TypeError, ValueError) as error:
        raise SpecError(f"{fields.place}.{key}: {error}") from error
