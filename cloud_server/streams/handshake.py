"""The first frame of a stream: do both sides hold the same model?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from cloud_server.models import Engine, Identity
from protos import PROTOCOL_VERSION
from protos.isthmus.v1 import split_pb2
from shared_hooks.errors import BadFrame, Disagreement, TooLarge, UnknownModel

MAX_NAME = 256
MAX_DIFFERENCES = 16
"""Named in one refusal."""
MAX_HELLO_BYTES = 64 << 10
MAX_ENTRIES = 64
"""Settings, and lines about the client: there are some ten of each."""


def check_form(hello: split_pb2.Hello) -> None:
    """What everybody relies on who copies, compares or logs a hello. Raises BadFrame and TooLarge."""
    nbytes = hello.ByteSize()
    if nbytes > MAX_HELLO_BYTES:
        raise TooLarge(f"hello: {nbytes} bytes; at most {MAX_HELLO_BYTES} are taken")
    for name, entries in (("settings", hello.environment), ("lines about the client", hello.about)):
        if len(entries) > MAX_ENTRIES:
            raise TooLarge(f"hello: {len(entries)} {name}; at most {MAX_ENTRIES} are taken")
    for key, value in hello.environment.items():
        _check_printable("a setting", f"{key}{value}")
    for name in ("client_id", "model_id", "weights_hash", "structure_digest", "plan_digest"):
        _check_printable(name, getattr(hello, name))


def _check_printable(name: str, text: str) -> None:
    """What a client says of itself stands in logs: it may not begin a line there."""
    if not text.isprintable():
        raise BadFrame(f"hello: {name} has control characters: {text[:80]!r}")


def agree(hello: split_pb2.Hello, engines: Mapping[str, Engine]) -> Engine:
    """The engine that this client and this server agree on. ``hello`` has passed `check_form`.

    Raises UnknownModel, Disagreement naming everything that differs with both sides' values, and BadFrame for a client
    id that is missing or too long. Model ids are looked up among the served ones, and in no other way.
    """
    if hello.protocol_version != PROTOCOL_VERSION:
        raise Disagreement(f"protocol version: client {hello.protocol_version}, server {PROTOCOL_VERSION}")
    if not 0 < len(hello.client_id) <= MAX_NAME:
        raise BadFrame(f"hello: client_id must have 1 to {MAX_NAME} characters, found {len(hello.client_id)}")
    engine = engines.get(hello.model_id)
    if engine is None:
        served = ", ".join(sorted(engines))
        raise UnknownModel(f'no model "{hello.model_id[:MAX_NAME]}" is served here; there is: {served}')
    different = list(islice(differences(hello, engine.identity), MAX_DIFFERENCES + 1))
    if different:
        different[MAX_DIFFERENCES:] = ["more"] * (len(different) > MAX_DIFFERENCES)
        raise Disagreement(
            f'model "{hello.model_id}": client and server differ in {"; ".join(different)} '
            f"(client: {_listed(hello.about)}; server: {_listed(engine.identity.about)})"
        )
    return engine


def differences(hello: split_pb2.Hello, identity: Identity) -> Iterator[str]:
    """One text for each thing in which a client's hello differs from a served model."""
    if hello.weights_hash != identity.weights_hash:
        yield _both("weights", hello.weights_hash, identity.weights_hash)
    if hello.structure_digest != identity.structure_digest:
        yield _both("structure (modules, shapes, dtypes, depth)", hello.structure_digest, identity.structure_digest)
    if hello.plan_digest and identity.plan_digest and hello.plan_digest != identity.plan_digest:
        yield _both("plan (operations on the example input)", hello.plan_digest, identity.plan_digest)
    for key in sorted({*hello.environment, *identity.environment}):
        client, server = hello.environment.get(key), identity.environment.get(key)
        if client != server:
            yield _both(f"setting {key[:MAX_NAME]}", client, server)


def _both(what: str, client: str | None, server: str | None) -> str:
    return f"{what}: client {_shown(client)}, server {_shown(server)}"


def _shown(value: str | None) -> str:
    if value is None:
        return "has none"
    return f'"{value[:MAX_NAME]}"' if value else "empty"


def _listed(about: Mapping[str, str]) -> str:
    entries = [f"{key[:MAX_NAME]} {value[:MAX_NAME]}" for key, value in sorted(about.items())[:16]]
    return "".join(sign if sign.isprintable() else " " for sign in ", ".join(entries)) or "says nothing"
