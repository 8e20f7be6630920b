"""`Reports`: requests get their numbers, and hooks hear what becomes of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from edge_client.answer import Answer
from edge_client.request.edge_model import EdgeModel
from edge_client.request.many import Position
from shared_hooks.errors import Cancelled
from shared_hooks.lifecycle import About, Stage


class Reports:
    """Numbers the requests of one client, and calls its hooks. Any thread may call."""

    def __init__(self, edge_model: EdgeModel, client_id: str) -> None:
        self.lifecycle = edge_model.lifecycle
        self._edge_model = edge_model
        self._client_id = client_id
        self._ids = itertools.count(1)
        self._singles = itertools.count()

    def about(self, position: Position | None = None) -> About:
        """A new request; ``position``: where in its run its input is, None for one by itself."""
        position = position or Position(next(self._singles), None)
        return About(self.next_id(), position.index, position.total, self._edge_model.model_id, self._client_id)

    def next_id(self) -> int:
        """No other request of this client has it."""
        return next(self._ids)

    def ending(self, about: About, answer: Callable[[], Answer]) -> Answer:
        """``answer()``, with which the request is over: with what it gives, or with what it raises."""
        try:
            with self.lifecycle.request(about):
                given = answer()
                self.lifecycle.emit(Stage.ON_RESULT, answer=given)
        except BaseException as error:
            self.over(about, error)
            raise
        self.over(about, answer=given)
        return given

    def over(self, about: About, error: BaseException | None = None, answer: Answer | None = None) -> None:
        """Hooks hear how it ended. Ctrl-C and what abandons a hedge are no errors."""
        if error is not None and not isinstance(error, Exception):
            error = Cancelled("the caller was interrupted")
        if error is not None and not isinstance(error, Cancelled):
            self.lifecycle.emit(Stage.ON_ERROR, about, where="request", error=error)
        self.lifecycle.emit(Stage.AFTER_REQUEST, about, error=error, answer=answer)
