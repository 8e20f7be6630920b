"""Define every error Isthmus raises on purpose.

    IsthmusError
    ├── UnknownLayer          no such layer id or name, or it did not run for this input
    ├── UnknownModel          no such model on this side
    ├── SpecError             a model spec, configuration or command line that cannot be used
    ├── InputMismatch         inputs of another structure, shape or dtype than the model or the plan takes
    ├── CutRefused            the plan cannot vouch for this cut; says why
    ├── BadFrame              bytes that are truncated, altered or malformed
    │   └── TooLarge          bytes, ranks or counts beyond a limit; raised before anything is allocated
    ├── Disagreement          the two sides differ in protocol, model, weights, code or settings; names what
    ├── PlanMismatch          while resuming, the model's code did something the plan does not hold
    │   └── PlaceholderRead   ... it read a value that was not sent
    ├── HookRefused           a life-cycle hook refused the request
    │   └── ObserverRefused   the server does not let clients request this observer
    ├── AccessRefused         this caller may not do this
    │   └── NotAuthenticated  missing or invalid credentials
    ├── QuotaExceeded         this caller has used up its quota for the minute; says when there is more
    ├── ModelFailed           the model itself raised; the original is the cause
    │   ├── WorkerLost        the process that computed the request ended
    │   └── ModelChanged      a run left the model changed, and it cannot be restored
    ├── ServerUnavailable     no server, it went away, or it is draining
    ├── SessionLost           the server does not have this decoding session (any more)
    ├── CodecFailed           a plugin's codec failed to decode, or returned a wrong tensor
    ├── ReferenceLost         the server does not have the frame that this one is the difference to (any more)
    ├── StepOutOfOrder        not the next step of its decoding session
    ├── DeadlineExceeded      no answer in time
    ├── Cancelled             the request was cancelled
    └── RemoteError           an error of the other side that has no class here

`status` is the gRPC status code (by name) with which a server reports the error: the only such table in the project.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import ClassVar

MALFORMED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions of reading JSON of an unexpected form: texts for numbers, infinities for integers, missing keys, lists
within lists.
"""


class IsthmusError(Exception):
    """Base of all errors raised on purpose; ``status`` names the gRPC status code that reports it."""

    status: ClassVar[str] = "INTERNAL"
    retry_after_seconds: float | None = None
    """Seconds after which the same may succeed, if known."""


class UnknownLayer(IsthmusError):
    """No such layer id or name, or the layer did not run for this input."""

    status = "NOT_FOUND"


class UnknownModel(IsthmusError):
    """No such model on this side."""

    status = "NOT_FOUND"


class SpecError(IsthmusError):
    """A model spec, configuration or command line that cannot be used."""

    status = "INVALID_ARGUMENT"


class InputMismatch(IsthmusError):
    """Inputs of another structure, shape or dtype than the model or the plan takes."""

    status = "INVALID_ARGUMENT"


class CutRefused(IsthmusError):
    """The plan cannot vouch for this cut; the message says why."""

    status = "FAILED_PRECONDITION"


class BadFrame(IsthmusError):
    """Bytes that are truncated, altered or malformed."""

    status = "INVALID_ARGUMENT"


class TooLarge(BadFrame):
    """Bytes, ranks or counts beyond a limit; raised before anything of that size is allocated."""

    status = "RESOURCE_EXHAUSTED"


class Disagreement(IsthmusError):
    """The two sides differ in protocol, model, weights, code or settings; the message names what."""

    status = "FAILED_PRECONDITION"
    wants_facts: bool = False
    """Whether the contents of the greeting's digests would tell more (`shared_hooks.modules.manifest`)."""


class PlanMismatch(IsthmusError):
    """While resuming, the model's code did something the plan does not hold."""

    status = "FAILED_PRECONDITION"


class PlaceholderRead(PlanMismatch):
    """The model read a value of the prefix that was not sent."""


class HookRefused(IsthmusError):
    """A life-cycle hook refused the request."""

    status = "PERMISSION_DENIED"


class ObserverRefused(HookRefused):
    """The server does not let clients request this observer. Older servers and clients call it `HookRefused`."""


class AccessRefused(IsthmusError):
    """The caller may not do this; the message says what."""

    status = "PERMISSION_DENIED"


class NotAuthenticated(AccessRefused):
    """Missing or invalid credentials; the message says which and why."""

    status = "UNAUTHENTICATED"


class QuotaExceeded(IsthmusError):
    """The caller has used up its quota for the minute; the message says when there is more."""

    status = "RESOURCE_EXHAUSTED"


class ModelFailed(IsthmusError):
    """The model itself raised; the original is the cause."""

    status = "INTERNAL"


class WorkerLost(ModelFailed):
    """The process that computed the request ended, more than once: a crash, or out of memory."""


class ModelChanged(ModelFailed):
    """A run of the model has changed what later runs use, and it cannot be restored: the model must be loaded again.

    Raised by that run and by every later one.
    """


class ServerUnavailable(IsthmusError):
    """No server, it went away, or it is draining."""

    status = "UNAVAILABLE"


class SessionLost(IsthmusError):
    """The server does not have this decoding session (any more), and the message says why. It can be rebuilt from its
    steps.
    """

    status = "NOT_FOUND"


class ReferenceLost(IsthmusError):
    """A frame is coded as the difference to one that the server does not keep (any more), and must be sent whole."""

    status = "FAILED_PRECONDITION"


class CodecFailed(IsthmusError):
    """A plugin's codec raised, or returned a wrong tensor; the request must be sent without it."""

    status = "FAILED_PRECONDITION"


class StepOutOfOrder(IsthmusError):
    """A step of a decoding session is not its next one."""

    status = "FAILED_PRECONDITION"


class DeadlineExceeded(IsthmusError):
    """No answer in time."""

    status = "DEADLINE_EXCEEDED"


class Cancelled(IsthmusError):
    """The request was cancelled."""

    status = "CANCELLED"


class RemoteError(IsthmusError):
    """An error of the other side that has no class here."""

    status = "UNKNOWN"


def _descendants(base: type[IsthmusError]) -> list[type[IsthmusError]]:
    return [base, *(found for child in base.__subclasses__() for found in _descendants(child))]


def by_name(name: str) -> type[IsthmusError]:
    """Return the class of this tree called ``name``; `RemoteError` if there is none."""
    return {error.__name__: error for error in _descendants(IsthmusError)}.get(name, RemoteError)


def near_path(name: str, known: Iterable[str]) -> str:
    """Suggest similar dotted paths, as `near`: first those with an equal end, below another prefix ("layer.0",
    "encoder.layer.0").
    """
    known, parts = list(known), name.split(".")[::-1]
    alike = {
        path: len(list(takewhile(lambda pair: pair[0] == pair[1], zip(parts, path.split(".")[::-1], strict=False))))
        for path in known
    }
    most = max(alike.values(), default=0)
    if most < min(2, len(parts)):
        return near(name, known)
    return near(name, [path for path, count in alike.items() if count == most], cutoff=0.0)


def near(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Suggest similar names for an unknown ``name``: ``" Did you mean a, b?"``, or nothing. ``cutoff``: similarity, up
    to 1.
    """
    close = difflib.get_close_matches(name, list(dict.fromkeys(known)), n=3, cutoff=cutoff)
    return f" Did you mean {', '.join(close)}?" if close else ""


@contextmanager
def logged(log: logging.Logger, what: str) -> Iterator[None]:
    """Log an exception of the block instead of raising it, in a thread that others rely on and that must not end.

    ``what``: the work that failed, for the log's line; the thread will try it again.
    """
    try:
        yield
    except Exception:
        log.exception("%s failed", what)
