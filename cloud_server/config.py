"""What one server process serves and how, read from its own TOML file.

listen = "127.0.0.1:50051"           # HOST:PORT; port 0 = any free one
reuse_port = true                    # another server may listen there, too (docs/operations.md); absent = false
device = "auto"                      # auto, cpu, cuda, xpu, mps, cuda:N; "cuda:0,cuda:1": each (docs/operations.md)
threads = 4                          # inside one operation on the CPU; absent = torch's choice
workers = 1                          # tails computed at a time, on each device
tensor_parallel = 1                  # processes among which the weights of each model are divided; docs/chains.md
worker_processes = false             # each in a process of its own; absent = if there are several
trials = "auto"                      # try cuts cold before they are served: auto, always, never (docs/operations.md)
codecs = ["learned:stem.safetensors"]  # beside the built-in ones, and plugins (docs/codec-plugins.md); absent = none
reflection = false                   # describe the services to any client (grpcurl)
insecure = false                     # true: other machines may connect in the clear

[tls]                                # absent: in the clear, which is for loopback only; docs/access.md
certificate = "server.pem"           # PEM; read again when the files change
key = "server.key"
client_ca = "ca.pem"                 # absent: clients need no certificate

[access]                             # absent: no token is required
identities = "identities.toml"       # who may do what, see access/identities.py; read again when it changes

[models]
digits = "digits"                    # id = a built-in model, a spec file (relative to this one), or module:callable

[models.other]
model = "digits"                     # the same, where more is said of it: what follows decoding, below

[models.resnet]                      # or a whole spec, see docs/model-spec.md, and
factory = "my_package.models:resnet"
weights = "resnet.safetensors"
decoding = "my_package.tails:make"   # (WrappedModel, layer) -> what decodes behind it; absent = the engine's own
device = "cuda:1"                    # absent = the server's
compile = "rounding"                 # compile those tails; true: use them only where bits are equal; absent = false
warm_up = { cuts = ["layer3"], batch_sizes = [1, 8] }  # tails that are run before it serves; absent = the shortest one
only = ["layer1", "layer3"]          # load the weights of this part alone (one name: to the end); absent = all
parts = ["layer2"]                   # a part on each device, cut here, in place of a copy; ["auto"]; docs/chains.md
tails = ["layer3"]                   # cuts that are models of the Open Inference Protocol, or "all"; absent = none

[limits]                             # see limits.py
max_request_bytes = 268435456

[observers]
allow = ["activation", "debug"]      # observers that clients may ask for in their tails; absent = none

[metrics]                            # for Prometheus, see docs/telemetry.md; absent = none
listen = "127.0.0.1:9464"            # HOST:PORT, or a port of loopback

[rest]                               # Open Inference Protocol by HTTP, see docs/doors.md; absent = by gRPC alone
listen = "127.0.0.1:8000"            # HOST:PORT, or a port of loopback; [tls] and [access] hold for it, too

[tracing]                            # OpenTelemetry, see docs/telemetry.md; absent = as the environment says
endpoint = "http://127.0.0.1:4317"

[next.gpu]                           # a server that parts of chains are handed on to, see docs/chains.md; absent = none
address = "gpu:50051"                # HOST:PORT, or a list: the first that serves
ca = "ca.pem"                        # and certificate, key, server_name, tls, token_file, insecure (docs/access.md)
sign_as = "gateway"                  # what it hears of callers is signed as this ...
secret_file = "gateway.secret"       # ... with this; absent: all that is handed on counts as this server's

[trust.gateway]                      # a server before this one, whose word on its callers is taken; absent = none
secret_file = "gateway.secret"

[ray]                                # with --on ray, see docs/ray.md
min_replicas = 1                     # of each model; or replicas = N, for as many at any time
max_replicas = 4
target_pending = 2.0                 # requests in a replica for which another one is started

[lifecycle]                          # the server's own hooks, see shared_hooks/lifecycle/registry.py
hooks = ["my_hooks:Watchdog"]
"""

from __future__ import annotations

import argparse
import dataclasses
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from cloud_server.access import Register, Signer, Tls, read_secret
from cloud_server.arguments import TRIALS, ServerOptions, check_address, check_network, with_host
from cloud_server.limits import Limits
from edge_client.credentials import Credentials
from shared_hooks.codecs import register
from shared_hooks.config import Table, kind_of, resolve
from shared_hooks.errors import IsthmusError, SpecError
from shared_hooks.lifecycle import Lifecycle
from shared_hooks.lifecycle.registry import load
from shared_hooks.models import ModelSpec, load_spec
from shared_hooks.models.spec import spec_from_table
from shared_hooks.modules import INPUT
from shared_hooks.observers import named
from shared_hooks.options import option_of
from shared_hooks.showing import short
from shared_hooks.tracing import endpoint_of

# How a server is scaled out by Ray Serve (``--on ray``): the table ``[ray]`` of its file, and ``--replicas``.


@dataclass(frozen=True)
class Scale:
    """How many copies of each model serve. Raises SpecError, naming the field, for values that cannot work."""

    min_replicas: int = 1
    max_replicas: int = 1
    target_pending: float = 2.0
    """The average number of requests in a replica from which another one is started."""
    upscale_seconds: float = 10.0
    """How long it must be exceeded before a replica is started ..."""
    downscale_seconds: float = 300.0
    """... or undercut before one is drained."""
    fronts: int = 1
    """Processes that accept clients: one for each machine that clients may connect to."""
    cpus: float = 1.0
    """Processors that Ray reserves for a replica; not a limit."""
    gpus: float = 0.0
    """GPUs that a replica sees; half of one is 0.5."""
    start_seconds: float = 300.0
    """The time limit for the start, including loading models."""

    def __post_init__(self) -> None:
        for name in ("min_replicas", "max_replicas", "fronts"):
            if getattr(self, name) < 1:
                raise SpecError(f"ray.{name}: expected at least 1, found {getattr(self, name)}")
        if self.max_replicas < self.min_replicas:
            raise SpecError(
                f"ray.max_replicas: expected at least min_replicas ({self.min_replicas}), found {self.max_replicas}"
            )
        for name in ("target_pending", "start_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise SpecError(f"ray.{name}: expected a number above 0, found {getattr(self, name)}")
        for name in ("upscale_seconds", "downscale_seconds", "cpus", "gpus"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise SpecError(f"ray.{name}: expected at least 0, found {getattr(self, name)}")

    @property
    def varies(self) -> bool:
        """Whether the number of replicas depends on the load."""
        return self.max_replicas > self.min_replicas

    def with_replicas(self, text: str) -> Scale:
        """As ``--replicas`` says: ``4``, or ``1-4``. Raises SpecError."""
        low, dash, high = text.partition("-")
        if not (low.isascii() and low.isdigit() and (not dash or (high.isascii() and high.isdigit()))):
            raise SpecError(f'--replicas: expected a number, or MIN-MAX such as 1-4, found "{text}"')
        try:
            return dataclasses.replace(self, min_replicas=int(low), max_replicas=int(high or low))
        except SpecError as error:
            raise SpecError(f"--replicas {text}: {error}") from error


def scale_of(table: Table) -> Scale:
    """Parse ``[ray]``: `Scale`'s fields; ``replicas = N`` for a fixed number. Raises SpecError."""
    replicas = table.take("replicas", int)
    values: dict[str, Any] = {each.name: table.take(each.name, type(each.default)) for each in fields(Scale)}
    table.done()
    given = {name: value for name, value in values.items() if value is not None}
    if replicas is not None:
        if "min_replicas" in given or "max_replicas" in given:
            table.fail("replicas", "stands for min_replicas and max_replicas: give either")
        given |= {"min_replicas": replicas, "max_replicas": replicas}
    elif "min_replicas" in given:
        given.setdefault("max_replicas", given["min_replicas"])
    return Scale(**given)


# One model to serve, and how: a line, or a table, of ``[models]`` in the server's file (`config`).


MOST_ROWS = 4096
COMPILED = ("bitwise", "rounding")
DecodingFactory = Callable[..., Any]
"""(`WrappedModel`, name of a layer) -> `models.decoding.DecodingTail`."""


@dataclass(frozen=True)
class WarmUp:
    """Tails of a model's example that run before it serves. Raises SpecError for impossible sizes."""

    cuts: tuple[str, ...] = ()
    """Names of layers; empty: the last cut."""
    batch_sizes: tuple[int, ...] = ()
    """Rows of the example; empty: as many as it has."""

    def __post_init__(self) -> None:
        for size in self.batch_sizes:
            if not 1 <= size <= MOST_ROWS:
                raise SpecError(f"warm_up.batch_sizes: expected 1 to {MOST_ROWS}, found {size}")


AUTO = "auto"
"""As `ModelEntry.parts`: the cuts are chosen when the model is loaded."""


@short
@dataclass(frozen=True)
class ModelEntry:
    """A model to serve: its spec, and how."""

    spec: ModelSpec
    decoding: DecodingFactory | None = None
    """Makes the tails of its decoding sessions, instead of the own engine."""
    device: str = ""
    """As `ServerConfig.device`; empty: the server's."""
    warm_up: WarmUp = field(default_factory=WarmUp)
    compile: str = ""
    """Whether the tails of `warm_up` are compiled and used: "bitwise" if every check found equal bits, "rounding" if
    the results are within `shared_hooks.compiling.TOLERANCE`. Empty: they are not.
    """

    tails: tuple[str, ...] = ()
    """Cuts behind which the tail is a model of its own in the Open Inference Protocol, ``NAME@CUT``; ("all",): each."""
    only: tuple[str, ...] = ()
    """The part whose weights are loaded, from the first cut to the second (or to the end); (): all."""
    parts: tuple[str, ...] = ()
    """Cuts between its devices, each of which has one part; ("auto",): parts of equal weights. (): each device has the
    whole model.
    """
    share: tuple[int, int] | None = None
    """With ``auto``: (the number of this part from 0, how many there are)."""

    def piece(self, number: int, count: int) -> ModelEntry:
        """Return the entry for the ``number``-th of its ``count`` parts alone."""
        if self.parts in ((), (AUTO,)):
            return replace(self, parts=(), share=(number, count))
        begin = self.parts[number - 1] if number else INPUT
        return replace(self, parts=(), only=(begin, *self.parts[number : number + 1]))

    def __post_init__(self) -> None:
        if self.compile not in ("", *COMPILED):
            raise SpecError(f'compile: expected "{COMPILED[0]}" or "{COMPILED[1]}", found "{self.compile}"')
        if not all(self.parts) or (AUTO in self.parts and len(self.parts) > 1):
            raise SpecError(f'parts: expected the cuts between the devices, or "auto"; found {self.parts}')
        if len(self.only) > 2 or not all(self.only):
            raise SpecError(
                f"only: expected the cut where a part begins, or two: where it ends, too; found {self.only}"
            )
        if self.parts and self.only:
            raise SpecError(f"parts, only: of {self.spec.model_id} either each device has a part, or all have the same")
        if (self.only or self.parts or self.share) and (self.tails or self.compile):
            what = "tails" if self.tails else "compile"
            raise SpecError(
                f"{what}: needs all of a model's weights, and of {self.spec.model_id} only a part is loaded"
            )


def _referred(name: str, reference: str, folder: Path, table: Table) -> ModelSpec:
    """Return the spec that an entry refers to. Raises SpecError."""
    file = folder / reference
    try:
        return load_spec(f"{name}={file if file.is_file() else reference}")
    except IsthmusError as error:
        raise SpecError(f"{table.origin}: {table.name(name)}: {error}") from error


def entries_of(table: Table, folder: Path) -> tuple[ModelEntry, ...]:
    """Parse ``[models]``; relative files lie in ``folder``. Raises SpecError."""
    entries = []
    for name, value in table.rest().items():
        # Several versions of one model: behind Ray Serve each has replicas of its own (docs/ray.md).
        references = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]
        if references and (isinstance(value, str) or references == value):
            entries += [ModelEntry(_referred(name, one, folder, table)) for one in references]
        elif isinstance(value, dict):
            inner = Table(value, table.origin, table.name(name))
            decodes = inner.take("decoding", str)
            where = f"{table.origin}: {inner.name('decoding')}"
            decoding = None if decodes is None else resolve(decodes, folder, where)
            tails = tuple(inner.take_list("tails", str, "a list of layers' names") or ())
            only = tuple(inner.take_list("only", str, "a list of one or two layers' names") or ())
            parts = tuple(inner.take_list("parts", str, 'a list of layers\' names, or ["auto"]') or ())
            device, warm_up = inner.take("device", str) or "", _warm_up(inner.table("warm_up"))
            compiled = inner.take_any("compile")
            reference = inner.take("model", str)
            if reference is None:
                spec = spec_from_table(inner, folder, model_id=name)
            else:
                spec = _referred(name, reference, folder, table)
                inner.done()
            entries.append(ModelEntry(spec, decoding, device, warm_up, _compiled(inner, compiled), tails, only, parts))
        else:
            table.fail(
                name, f"expected a built-in model, a spec file, module:callable or a table, found {kind_of(value)}"
            )
    return tuple(entries)


def _compiled(table: Table, value: object) -> str:
    """Return the value of ``compile``; True stands for the stricter mode."""
    if value in (None, False):
        return ""
    if value is not True and value not in COMPILED:
        table.fail("compile", f'expected true, "{COMPILED[0]}" or "{COMPILED[1]}"')
    return COMPILED[0] if value is True else str(value)


def _warm_up(table: Table | None) -> WarmUp:
    if table is None:
        return WarmUp()
    cuts = table.take_list("cuts", str, "a list of layers' names") or ()
    sizes = table.take_list("batch_sizes", int, "a list of sizes") or ()
    table.done()
    return WarmUp(tuple(cuts), tuple(sizes))


# The next servers of chains: tables ``[next.NAME]``; and the servers before this one: ``[trust.NAME]``.


@dataclass(frozen=True)
class NextServer:
    """A server that parts are passed on to: its ``name``, and ``addresses`` (HOST:PORT) of which the first available is
    used.
    """

    name: str
    addresses: tuple[str, ...]
    credentials: Credentials = field(default_factory=Credentials)
    signer: Signer | None = None
    """Signs for the caller; None: requests that are passed on count as this server's own."""

    def __post_init__(self) -> None:
        if not self.addresses:
            raise SpecError(f"next.{self.name}: it has no address")
        for address in self.addresses:
            check_address(address, f"next.{self.name}")


def next_of(table: Table, folder: Path) -> tuple[NextServer, ...]:
    """Parse ``[next]``. Raises SpecError."""
    found = []
    for name, value in table.rest().items():
        if not isinstance(value, dict):
            table.fail(name, f"expected a table with an address, found {kind_of(value)}")
        inner = Table(value, table.origin, table.name(name))
        address: Any = inner.take_any("address")
        addresses: list[Any] = address if isinstance(address, list) else [address]
        if not addresses or not all(isinstance(one, str) for one in addresses):
            inner.fail("address", "expected HOST:PORT, or a list of such")
        given: dict[str, Any] = {key: inner.take(key, str) for key in ("ca", "certificate", "key", "token_file")}
        given = {key: None if file is None else folder / file for key, file in given.items()}
        given |= {key: inner.take(key, bool) or False for key in ("tls", "insecure")}
        given["server_name"] = inner.take("server_name", str)
        sign_as, secret = inner.take("sign_as", str), inner.take("secret_file", str)
        inner.done()
        if (sign_as is None) != (secret is None):
            inner.fail("sign_as", "needs secret_file, and secret_file needs sign_as")
        signer = None if sign_as is None or secret is None else Signer(sign_as, read_secret(folder / secret))
        found.append(NextServer(name, tuple(addresses), Credentials(**given), signer))
    return tuple(found)


def trusted_of(table: Table, folder: Path) -> dict[str, bytes]:
    """Parse ``[trust]``: secrets by name. Raises SpecError."""
    found = {}
    for name, value in table.rest().items():
        if not isinstance(value, dict):
            table.fail(name, f"expected a table with secret_file, found {kind_of(value)}")
        inner = Table(value, table.origin, table.name(name))
        found[name] = read_secret(folder / inner.need("secret_file", str))
        inner.done()
    return found


@short
@dataclass(frozen=True)
class ServerConfig(ServerOptions):
    """The configuration of a server process. Raises SpecError for invalid values; without models it serves `digits`."""

    models: tuple[ModelEntry, ...] = ()
    limits: Limits = field(default_factory=Limits)
    observers: tuple[str, ...] = ()
    """Observers that clients may ask for."""
    tls: Tls | None = None
    next: tuple[NextServer, ...] = ()
    """Servers that parts of chains are passed on to."""
    trusted: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Servers that may vouch for their callers, and the secret that each signs with."""
    tracing: str = ""
    """Where traces go; empty: as the environment says."""
    scale: Scale = field(default_factory=Scale)
    """The scaling by Ray Serve."""
    lifecycle: Lifecycle = field(default_factory=lambda: load("cloud", None, Path.cwd()), compare=False)

    def __post_init__(self) -> None:
        check_address(self.listen)
        if self.reuse_port and not hasattr(socket, "SO_REUSEPORT"):
            raise SpecError("reuse_port: this system does not let two servers share a port")
        if self.metrics:
            check_address(self.metrics, "metrics")
        if self.rest:
            check_address(self.rest, "rest")
        if self.pages is not None and not self.rest:
            raise SpecError("--try: only with --rest-port, by which the page is shown")
        if self.threads is not None and self.threads < 1:
            raise SpecError(f"threads: expected at least 1, found {self.threads}")
        if self.trials not in TRIALS:
            raise SpecError(f'trials: expected {", ".join(TRIALS)}, found "{self.trials}"')
        if self.workers < 1:
            raise SpecError(f"workers: expected at least 1, found {self.workers}")
        if self.tensor_parallel < 1:
            raise SpecError(f"tensor_parallel: expected at least 1, found {self.tensor_parallel}")
        if self.tensor_parallel > 1:
            self._check_shards()

    def _check_shards(self) -> None:
        if self.worker_processes is False:
            raise SpecError("--in-process: a model that is divided among processes (tensor_parallel) needs workers")
        if "," in self.device or any("," in entry.device for entry in self.models):
            raise SpecError("device: one kind for a model that is divided among processes: each takes one of it")
        for entry in self.models:
            divided = entry.only or entry.parts
            if divided or entry.tails or entry.compile or entry.decoding is not None or entry.warm_up != WarmUp():
                raise SpecError(
                    f"{entry.spec.model_id}: only, parts, tails, compile, warm_up and decoding are not for models that "
                    "are divided among processes (tensor_parallel)"
                )

    @property
    def in_processes(self) -> bool:
        """Whether workers are processes."""
        many = self.workers > 1 or self.tensor_parallel > 1
        return many if self.worker_processes is None else self.worker_processes

    def check_access(self) -> None:
        """Raise SpecError for unusable access files, and for an unencrypted address that other machines can reach,
        unless that is allowed explicitly.
        """
        if self.tls is not None:
            self.tls.read()
        elif not self.insecure:
            for what, address in (("listen", self.listen), ("rest", self.rest)):
                if address:
                    check_network(address, tokens=self.identities is not None, what=what)
        Register(self.identities)


def read_config(path: Path) -> ServerConfig:
    """Return the configuration of a TOML file. Raises SpecError with the file, the key, what was expected and found."""
    table = Table.read(path)
    if "factory" in table or "id" in table:
        raise SpecError(f"{path} is a model's spec, and no configuration: --model {path} serves it")
    values: dict[str, Any] = {
        each.name: table.take(each.name, declared.key)
        for each in fields(ServerOptions)
        if (declared := option_of(each)) is not None and declared.key is not None
    }
    values["codecs"] = table.take_list("codecs", str, "a list of codecs")
    models, limits, observers = table.table("models"), table.table("limits"), table.table("observers")
    lifecycle, tls, access = table.table("lifecycle"), table.table("tls"), table.table("access")
    metrics, tracing = table.table("metrics"), table.table("tracing")
    rest, ray = table.table("rest"), table.table("ray")
    following, trust = table.table("next"), table.table("trust")
    table.done()
    try:
        if values["codecs"] is not None:
            values["codecs"] = tuple(register(one, path.resolve().parent) for one in values["codecs"])
        if tls is not None:
            values["tls"] = _tls(tls, path.resolve().parent)
        if access is not None:
            values["identities"] = path.resolve().parent / access.need("identities", str)
            access.done()
        if models is not None:
            values["models"] = entries_of(models, path.resolve().parent)
        if limits is not None:
            values["limits"] = _limits(limits)
        if observers is not None:
            values["observers"] = _observers(observers, path.resolve().parent)
        if metrics is not None:
            values["metrics"] = with_host(metrics.need("listen", str))
            metrics.done()
        if rest is not None:
            values["rest"] = with_host(rest.need("listen", str))
            shown = rest.take("pages", str)
            values["pages"] = None if shown is None else path.resolve().parent / shown
            rest.done()
        if tracing is not None:
            values["tracing"] = endpoint_of(tracing)
        if ray is not None:
            values["scale"] = scale_of(ray)
        if following is not None:
            values["next"] = next_of(following, path.resolve().parent)
        if trust is not None:
            values["trusted"] = trusted_of(trust, path.resolve().parent)
        if lifecycle is not None:
            values["lifecycle"] = load("cloud", lifecycle, path.resolve().parent)
        return ServerConfig(**{key: value for key, value in values.items() if value is not None})
    except SpecError as error:
        raise error if str(error).startswith(str(path)) else SpecError(f"{path}: {error}") from error


def _tls(table: Table, folder: Path) -> Tls:
    certificate, key, client_ca = table.need("certificate", str), table.need("key", str), table.take("client_ca", str)
    table.done()
    return Tls(folder / certificate, folder / key, None if client_ca is None else folder / client_ca)


def _observers(table: Table, folder: Path) -> tuple[str, ...]:
    allowed = table.take("allow", list) or []
    table.done()
    for name in allowed:
        if not isinstance(name, str):
            table.fail("allow", f"expected names, found {kind_of(name)}")
    try:
        return named.check(allowed, folder)
    except SpecError as error:
        table.fail("allow", str(error))


def _limits(table: Table) -> Limits:
    values: dict[str, Any] = {
        each.name: table.take(each.name, float if isinstance(each.default, float) else int)
        for each in fields(Limits)
        if not isinstance(each.default, tuple)
    }
    sizes = table.take_list("preferred_batch_size", int, "an array of integers")
    values["preferred_batch_size"] = None if sizes is None else tuple(sizes)
    table.done()
    return Limits(**{name: value for name, value in values.items() if value is not None})


# What the command line builds from a configuration.


def configure(options: argparse.Namespace) -> ServerConfig:
    """Return the configuration file, if any, with the command line on top of it. Raises SpecError or UnknownModel."""
    config = composed(options)
    config.check_access()
    return config


def composed(options: argparse.Namespace) -> ServerConfig:
    """As `configure`, without checking certificates and identities."""
    config = read_config(options.config) if options.config else ServerConfig()
    given = {each.name: getattr(options, each.name) for each in fields(ServerOptions)}
    given["tls"] = _given_tls(options)
    given["next"] = (*config.next, *map(_given_next, options.next))
    given["codecs"] = (*config.codecs, *(register(one) for one in options.codecs or ()))
    config = dataclasses.replace(config, **{name: value for name, value in given.items() if value is not None})
    bounds = {name: getattr(options, name) for name in ("drain_seconds", "max_model_bytes")}
    bounds = {name: value for name, value in bounds.items() if value is not None}
    config = dataclasses.replace(config, limits=dataclasses.replace(config.limits, **bounds))
    if options.replicas is not None:
        if options.on != "ray":
            raise SpecError("--replicas: only with --on ray; on one machine there are --workers")
        config = dataclasses.replace(config, scale=config.scale.with_replicas(options.replicas))
    references = options.model or ([] if config.models else ["digits"])
    ids = [load_spec(reference).model_id for reference in references]
    weights, examples = _by_model("--weights", options.weights, ids), _by_model("--example", options.example, ids)
    selections = _by_model("--selection", options.selection, ids)
    tails, only = _by_model("--tails", options.tails, ids), _only(options, ids)
    parts = _by_model("--parts", options.parts, ids)
    models = []
    for id, reference in zip(ids, references, strict=True):
        of = {"weights": weights.get(id), "selection": selections.get(id), "example": examples.get(id)}
        cuts = tuple(one.strip() for one in tails[id].split(",")) if id in tails else ()
        between = tuple(one.strip() for one in parts[id].split(",")) if id in parts else ()
        models.append(ModelEntry(load_spec(reference, **of), tails=cuts, only=only.get(id, ()), parts=between))
    return dataclasses.replace(config, models=(*config.models, *models))


def _only(options: argparse.Namespace, ids: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Return the part whose weights are loaded, by model. Raises SpecError."""
    found: dict[str, tuple[str, ...]] = {}
    for option, given, count in (("--only-middle", options.only_middle, 2), ("--only-tail", options.only_tail, 1)):
        for id, text in _by_model(option, given, ids).items():
            cuts = tuple(one.strip() for one in text.split(","))
            if len(cuts) != count or not all(cuts):
                expected = "the cuts where a part begins and ends" if count == 2 else "the cut where the tail begins"
                raise SpecError(f"{option} {text}: expected {expected}")
            if id in found:
                raise SpecError(f"--only-middle, --only-tail: model {id} has one part")
            found[id] = cuts
    return found


def _given_next(text: str) -> NextServer:
    """Parse ``--next``. Raises SpecError."""
    name, equals, address = text.rpartition("=")
    try:
        return NextServer(name if equals else address, (address,))
    except SpecError as error:
        raise SpecError(f"--next {text}: {error}") from error


def _given_tls(options: argparse.Namespace) -> Tls | None:
    """Return the TLS files on the command line, which replace the file's [tls]; None if there are none."""
    if options.cert is None and options.key is None and options.client_ca is None:
        return None
    if options.cert is None or options.key is None:
        raise SpecError("--cert, --key: the one needs the other (and --client-ca both)")
    return Tls(options.cert, options.key, options.client_ca)


def _by_model(option: str, texts: Sequence[str], ids: Sequence[str]) -> Mapping[str, str]:
    """Return an option's value by model; without ``NAME=`` it is for the only one."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            if len(ids) != 1:
                raise SpecError(f"{option} {text}: {len(ids)} models are given by --model; say NAME={text}")
            name, value = ids[0], text
        if name not in ids:
            known = ", ".join(ids) or "none"
            raise SpecError(f'{option} {text}: no model "{name}" is given by --model; there is: {known}')
        found[name] = value
    return found
