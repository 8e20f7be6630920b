"""What the end of a stream means: a reason that time does not heal, or a break that is to be mended."""

from __future__ import annotations

from typing import Any, Final, cast

import grpc

from edge_client.credentials import Credentials
from edge_client.handshake import why_not
from protos import FACTS_WANTED
from shared_hooks.errors import (
    AccessRefused,
    BadFrame,
    Disagreement,
    IsthmusError,
    NotAuthenticated,
    RemoteError,
    ServerUnavailable,
    UnknownModel,
    by_name,
)

# Every other status is a break: a killed server shows as UNAVAILABLE, INTERNAL, UNKNOWN or CANCELLED.
_FINAL: Final[dict[grpc.StatusCode, type[IsthmusError]]] = {
    grpc.StatusCode.FAILED_PRECONDITION: Disagreement,
    grpc.StatusCode.NOT_FOUND: UnknownModel,
    grpc.StatusCode.INVALID_ARGUMENT: BadFrame,
    grpc.StatusCode.UNIMPLEMENTED: Disagreement,
    grpc.StatusCode.UNAUTHENTICATED: NotAuthenticated,
    grpc.StatusCode.PERMISSION_DENIED: AccessRefused,
}


def final_error(error: grpc.RpcError, address: str, credentials: Credentials | None = None) -> IsthmusError | None:
    """The error to raise for a stream that ended for good; None for one that broke.

    ``credentials``: with which it was opened, where it is not known yet whether they are any good.
    """
    call = _call(error)
    made = _FINAL.get(call.code())
    if made is not None:
        text = (call.details() or "").removeprefix(f"{made.__name__}: ")
        refused = made(f"{address} refused: {text}")
        if isinstance(refused, Disagreement):
            refused.wants_facts = any(key == FACTS_WANTED for key, _ in call.trailing_metadata() or ())
        return refused
    if credentials is None or call.code() is not grpc.StatusCode.UNAVAILABLE or nobody_there(error):
        return None
    return why_not(address, credentials)


def refusal(error: grpc.RpcError, address: str, credentials: Credentials | None = None) -> IsthmusError:
    """What a call ended with, by the name that an Isthmus server gives it; `ServerUnavailable` for what has none.

    ``credentials``: as in `final_error`.
    """
    call = _call(error)
    if call.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Disagreement(f"{address} cannot be asked for this: an older server, or another one ({call.details()})")
    name, colon, text = (call.details() or "").partition(": ")
    made = by_name(name) if colon else RemoteError
    if made is RemoteError:
        return final_error(error, address, credentials) or ServerUnavailable(f"{address}: {reason(error)}")
    return made(f"{text} (reported by {address})")


def reason(error: grpc.RpcError) -> str:
    """Why the stream ended, in words."""
    call = _call(error)
    return f"{call.code().name}: {call.details() or 'no details'}"


def pinged_too_often(error: grpc.RpcError) -> bool:
    """Whether the other side sent us away for our keep-alive pings."""
    return "too_many_pings" in (_call(error).details() or "")


def nobody_there(error: grpc.RpcError) -> bool:
    """Whether the other machine answered that nobody listens there."""
    return "Connection refused" in (_call(error).details() or "")


def _call(error: grpc.RpcError) -> Any:
    # gRPC raises the call itself, which has code() and details(); its base class declares neither.
    return cast(Any, error)
