"""The one door: whether a call may be served, asked for every RPC of every service before anything of it is read.

A check of credentials belongs into `Door.check`; what the caller sends with a call (its metadata) is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from cloud_server import wire
from cloud_server.access import Caller
from cloud_server.core import Core
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import IsthmusError

SERVICE = split_pb2.DESCRIPTOR.services_by_name["Split"].full_name
BEGINS_WORK = frozenset(f"/{SERVICE}/{name}" for name in ("Session", "Probe", "Profile"))
"""Calls that a draining server does not take; health, reflection and the list of models it answers to the end."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call as it arrives: the full name of the method (``/isthmus.v1.Split/Session``), and its metadata."""

    method: str
    metadata: tuple[tuple[str, str | bytes], ...]


class Door(grpc.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Of one server."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def caller(self, context: grpc.ServicerContext) -> Caller:
        """Who is at the other end of a call that was let in."""
        return Caller(context.peer())

    def check(self, call: Call) -> None:
        """Raises an `IsthmusError`, whose status the caller gets, for a call that is not to be served."""
        if call.method in BEGINS_WORK:
            self._core.check_open()

    def intercept_service(self, continuation: Callable[[Any], Any], details: grpc.HandlerCallDetails) -> Any:
        """gRPC's entry: the method's own handler, or one that refuses."""
        handler = continuation(details)
        try:
            self.check(Call(details.method, tuple(details.invocation_metadata or ())))
        except IsthmusError as error:
            return handler and _refusing(handler, error)
        return handler


def abort(context: grpc.ServicerContext, error: IsthmusError) -> NoReturn:
    """End a call with the error's status, its class and what it says."""
    text = f"{type(error).__name__}: {wire.message(error)}"
    # Beyond ASCII one character takes up to twelve bytes of a trailer.
    context.abort(grpc.StatusCode[error.status], text if text.isascii() else text[:600])
    raise AssertionError("unreachable: abort raises")


def _refusing(handler: Any, error: IsthmusError) -> Any:
    """A handler of the same kind that only refuses."""

    def refuse(_: Any, context: grpc.ServicerContext) -> NoReturn:
        abort(context, error)

    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return kinds[handler.request_streaming, handler.response_streaming](refuse)
