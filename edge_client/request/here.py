"""`Here`: the whole model, on this side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_client.answer import Answer
from edge_client.call import Call
from edge_client.modes import EDGE_ONLY
from edge_client.request.edge_model import EdgeModel
from edge_client.request.many import Position
from edge_client.request.reports import Reports
from edge_client.transport import ServerTimes, Stamps, Times, now_ns
from shared_hooks.lifecycle import About, Stage


class Here:
    """One model's answers without a server. ``postprocess``: output -> result."""

    def __init__(self, edge_model: EdgeModel, reports: Reports, postprocess: Callable[[Any], Any] | None) -> None:
        self._edge_model = edge_model
        self._reports = reports
        self._postprocess = postprocess

    def answer(self, call: Call, stamps: Stamps, position: Position | None = None) -> Answer:
        """To a request of its own."""
        about = self._reports.about(position)

        def answer() -> Answer:
            self._reports.lifecycle.emit(Stage.BEFORE_REQUEST, inputs=call, split=EDGE_ONLY, began_ns=stamps.called)
            return self._answer(call, stamps, about)

        return self._reports.ending(about, answer)

    def instead(self, work: Call | Path, stamps: Stamps, about: About, why: str) -> Answer:
        """Though the request was to be split: ``why``."""
        call = work if isinstance(work, Call) else self._edge_model.read(work)
        return replace(self._answer(call, stamps, about), fallback=why)

    def _answer(self, call: Call, stamps: Stamps, about: About) -> Answer:
        whole = self._edge_model.whole(call, stamps)
        finished = stamps.unpacked or now_ns()
        return Answer(
            output=whole.output,
            postprocess=self._postprocess,
            request_id=about.id,
            split=EDGE_ONLY,
            layer_id=None,
            times=Times.from_stamps(stamps, ServerTimes()),
            layers_edge=whole.layers,
            layers_cloud=[],
            bytes_up=0,
            bytes_down=0,
            sends=0,
            measured_ns=finished - stamps.called - stamps.aside_ns,
            finished_ns=finished,
            forward_edge=whole.forward,
            observations=self._edge_model.observed(tuple(whole.observations), whole.observations),
            transforms=whole.transforms,
        )
