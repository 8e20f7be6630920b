"""Hooks that a TOML file names."""

from __future__ import annotations

from collections.abc import Iterator

from shared_hooks.lifecycle import Event, Stage, on


class Watchdog:
    """Counts heads and tails."""

    def __init__(self, limit: int = 3) -> None:
        if limit < 0:
            raise ValueError("the limit is below 0")
        self.limit = limit
        self.seen = 0

    def after_head(self, event: Event) -> None:
        self.seen += 1

    def after_tail(self, event: Event) -> None:
        self.seen += 1


class Quiet:
    """In the place of the log."""

    name = "quiet"
    priority = "HIGH"

    def on_error(self, event: Event) -> None: ...


class Picky:
    """Has no default for what it needs."""

    def __init__(self, needed: int) -> None:
        self.needed = needed

    def on_error(self, event: Event) -> None: ...


class Misspelt:
    def on_eror(self, event: Event) -> None: ...


@on(Stage.AFTER_REQUEST, priority="LOW", name="marked")
def marked(event: Event) -> None: ...


@on("after_inject")
def cloud_alone(event: Event) -> None: ...


@on("before_request")
def breaks(event: Event) -> None:
    raise ValueError("on purpose")


made = Watchdog(7)
number = 3


class Awaited:
    async def after_request(self, event: Event) -> None: ...


class Lonely:
    def after_request(self) -> None: ...


class Ends:
    def __init__(self) -> None:
        raise SystemExit(7)

    def after_request(self, event: Event) -> None: ...


@on("after_request")
def yields(event: Event) -> Iterator[None]:
    yield


def unmarked(event: Event) -> None: ...
