"""The first frame of a stream: whether both sides hold the same model. And the descriptions of cuts, by digest.

A description is uploaded once, used by every request at that cut, and shared by all clients.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

from cloud_server.limits import Limits
from cloud_server.models import Engine, Identity, version_of
from protos import PROTOCOL_VERSION
from protos.isthmus.v1 import split_pb2
from shared_hooks import Crossing
from shared_hooks.crossing import decode, decoded_bytes, digest_of
from shared_hooks.errors import BadFrame, Disagreement, TooLarge, UnknownModel
from shared_hooks.forward.context import excused
from shared_hooks.modules import manifest
from shared_hooks.modules.manifest import MAX_DIFFERENCES, MAX_LINE, MAX_NOTES, ManifestComparison, compare
from shared_hooks.sharing import Owner, SharedCache

MAX_NAME = 256
MAX_HELLO_BYTES = 64 << 10
"""Without the manifest, which has a limit of its own."""
CONFIGURATION, CODE, TABLES = "model_configuration", "model_code", "model_tables"
"""Settings that are digests of the model."""
MAX_ENTRIES = 64
"""The maximum number of settings, and of lines about the client; there are about ten of each."""
_one = threading.Lock()
"""Held while a client's manifest is compared, so that costly ones are compared one at a time."""


def check_form(hello: split_pb2.Hello) -> None:
    """Check the limits that code which copies, compares or logs a hello relies on. Raises BadFrame and TooLarge."""
    nbytes = hello.ByteSize() - len(hello.manifest)
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
    """Refuse control characters in what a client says about itself: it appears in logs and must not begin a
    line there.
    """
    if not text.isprintable():
        raise BadFrame(f"hello: {name} has control characters: {text[:80]!r}")


@dataclass(frozen=True)
class Agreement:
    """What a client and this server agreed on.

    ``notes``: differences without any effect on results; ``rounding``: differences that affect their last bits only.
    """

    engine: Engine
    notes: tuple[str, ...] = ()
    rounding: tuple[str, ...] = ()


def agree(hello: split_pb2.Hello, engines: Mapping[str, Engine]) -> Agreement:
    """Return the engine that this client and this server agree on. ``hello`` has passed `check_form`.

    Digests decide; where they differ and the client sent what its digests are made of, the single facts do. Raises
    UnknownModel, Disagreement that names every difference with both sides' values, and BadFrame for a client id that is
    missing or too long. Model ids are only looked up among the served models.
    """
    if hello.protocol_version != PROTOCOL_VERSION:
        raise Disagreement(f"protocol version: client {hello.protocol_version}, server {PROTOCOL_VERSION}")
    if not 0 < len(hello.client_id) <= MAX_NAME:
        raise BadFrame(f"hello: client_id must have 1 to {MAX_NAME} characters, found {len(hello.client_id)}")
    engine = version_of(engines, hello.model_id, hello.weights_hash)
    if engine is None:
        served = ", ".join(sorted(engines))
        raise UnknownModel(f'no model "{hello.model_id[:MAX_NAME]}" is served here; there is: {served}')
    digests = dict(differing_digests(hello, engine.identity))
    found = _compared(hello, engine) if digests and hello.manifest else NOTHING
    if not found.differences:  # weights, structure, plan and code must be equal
        for key, lines in ((CONFIGURATION, found.notes), (TABLES, found.rounding)):
            if lines:
                digests.pop(key, None)
    settings = dict(differing_settings(hello, engine.identity))
    releases = hello.about.get("torch"), engine.identity.about.get("torch")
    kernels = [settings.pop(name) for name in [*settings] if excused(name, *releases)]
    different = [*(found.differences or digests.values()), *settings.values()]
    if different:
        shown = [text[:MAX_LINE] for text in different[:MAX_DIFFERENCES]] + ["more"] * (
            len(different) > MAX_DIFFERENCES
        )
        refusal = Disagreement(
            f'model "{engine.identity.model_id}": client and server differ in {"; ".join(shown)} '
            f"(client: {_listed(hello.about)}; server: {_listed(engine.identity.about)})"
        )
        refusal.wants_facts = bool(digests) and not hello.manifest
        raise refusal
    return Agreement(engine, found.notes, tuple(text[:MAX_LINE] for text in [*found.rounding, *kernels][:MAX_NOTES]))


NOTHING = ManifestComparison()


def _compared(hello: split_pb2.Hello, engine: Engine) -> ManifestComparison:
    """Compare the facts of both sides; empty if one side has too many of them, so that the digests decide."""
    try:
        own = engine.manifest()
        with _one:
            return compare(manifest.decode(hello.manifest, own), own)
    except TooLarge:
        return NOTHING


def differing_digests(hello: split_pb2.Hello, identity: Identity) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of the digests in which a hello differs from a served model and a manifest can tell more."""
    if hello.weights_hash != identity.weights_hash:
        yield "weights", _both("weights", hello.weights_hash, identity.weights_hash)
    if hello.structure_digest != identity.structure_digest:
        what = "structure (modules, shapes, dtypes)"
        yield "structure", _both(what, hello.structure_digest, identity.structure_digest)
    if hello.plan_digest and identity.plan_digest and hello.plan_digest != identity.plan_digest:
        yield "plan", _both("plan (operations on the example input)", hello.plan_digest, identity.plan_digest)
    for key in (CONFIGURATION, CODE, TABLES):
        yield from ((key, text) for text in _differing_setting(key, hello, identity))


def differing_settings(hello: split_pb2.Hello, identity: Identity) -> Iterator[tuple[str, str]]:
    """As `differing_digests`, for the settings of the process."""
    for key in sorted({*hello.environment, *identity.environment} - {CONFIGURATION, CODE, TABLES}):
        yield from ((key, text) for text in _differing_setting(key, hello, identity))


def _differing_setting(key: str, hello: split_pb2.Hello, identity: Identity) -> Iterator[str]:
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


LARGE = 64 << 10
"""Descriptions of at least this many bytes are decoded one at a time."""


class CrossingCache:
    """The descriptions used last, bounded in number and memory. Thread-safe.

    Each counts for the clients that used it last (`sharing`), so a client with ever new cuts evicts its own.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._one_large = threading.Lock()
        """Held while a large description is decoded, which takes as much memory again as the result."""
        self._kept: SharedCache[str, Crossing] = SharedCache(limits.max_cuts, limits.max_cuts_bytes)

    def add(self, digest: str, data: bytes, owner: Owner) -> Crossing:
        """Decode and keep a description. Raises BadFrame if it is malformed or ``digest`` is not its own, and TooLarge.

        Clients share the entries, so the key is the digest of the bytes, not the one that the client claims.
        """
        if len(data) > self._limits.max_cut_bytes:
            most = f"at most {self._limits.max_cut_bytes} are accepted (max_cut_bytes)"
            raise TooLarge(f"a cut's description of {len(data)} bytes; {most}")
        if (real := digest_of(data)) != digest:
            raise BadFrame(f'cut: the digest {digest[:80]!r} is not that of its bytes, "{real}"')
        known = self.get(digest, owner)
        if known is not None:
            return known
        with self._one_large if len(data) > LARGE else nullcontext():
            crossing = decode(data, self._limits.max_request_bytes, remember=False)
        with self._lock:
            known = self._kept.get(digest, owner)  # replaced by another stream meanwhile
            if known is None:
                self._kept.put(digest, crossing, decoded_bytes(data) + crossing.working_bytes, owner)
            return known or crossing

    def get(self, digest: str, owner: Owner) -> Crossing | None:
        """Return the description with this digest, or None if it never came or was evicted. It counts for ``owner``
        from now on.
        """
        with self._lock:
            return self._kept.get(digest, owner)

    def __contains__(self, digest: str) -> bool:
        return digest in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """The bytes that the descriptions take (`decoded_bytes` and `Crossing.working_bytes`)."""
        return self._kept.nbytes
