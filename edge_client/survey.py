"""Gathers what a plan needs: both profiles, the link and the load, from files or measured now."""

from __future__ import annotations

import itertools
import json
import statistics
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from edge_client.call import Call, Load
from edge_client.core import ClientCore
from edge_client.credentials import Credentials
from edge_client.dial import dial
from edge_client.planning.codecs import LEARNT, Codecs
from edge_client.planning.link import Link
from edge_client.planning.objective import Candidate
from edge_client.planning.predict import BATCHES, Correction, GivenPower, RequestSample, cuts_to_measure, predict
from edge_client.probing import fetch_profile, probe, round_trip
from edge_client.process import local_server
from edge_client.request import Books
from edge_client.screen import counted
from edge_client.screen import progress as bar
from edge_client.transport import Connection, ConnectionOptions, Exchange, Outgoing, Stamps, wire
from edge_client.user_input import LoadedModel, name_of
from edge_client.user_text import EDGE_ONLY, option
from protos.isthmus.v1 import split_pb2
from shared_hooks.codecs.basis import Basis
from shared_hooks.errors import (
    AccessRefused,
    CutRefused,
    DeadlineExceeded,
    Disagreement,
    IsthmusError,
    ServerUnavailable,
    SpecError,
)
from shared_hooks.metrics import Reading
from shared_hooks.models import set_threads
from shared_hooks.profiling import machine
from shared_hooks.profiling import profile as profiles
from shared_hooks.profiling.profile import CodecProfile, CutProfile, FileInput, ModelIdentity, Profile, Quartiles
from shared_hooks.profiling.profiler import ProfileOptions, Progress, identity, profile_edge
from shared_hooks.profiling.timers import HeadTimer
from shared_hooks.profiling.timers import Inputs as TimedInputs
from shared_hooks.showing import short

# A server's decoding time for the codec "basis": measured with real requests, because a server profiles without
# codebooks.
#
# Each cut with codebooks gets a few requests with the frontier that profiles are made of, and each answer reports its
# decoding time. Nothing else of them is used.


REQUESTS: Final = 5
"""At each cut, after one that does not count: it brings the books, and the server's memory for the answer is new."""
REQUEST_SECONDS: Final = 30.0


def measured_by_servers(codecs: Iterable[str]) -> tuple[str, ...]:
    """Return those whose decoding a server measures by itself, on frontiers of its own."""
    return tuple(name for name in codecs if name not in LEARNT)


def with_books(
    cloud: Profile,
    loaded: LoadedModel,
    books: Mapping[str, Books],
    server: str,
    warn: Callable[[str], None],
    on_progress: Progress = lambda done, total, what: None,
    *,
    seconds: float = 20.0,
    patience: float = 15.0,
    credentials: Credentials | None = None,
) -> Profile:
    """``cloud``, the profile of this server, with "basis" at the cuts of ``books``. No further cut is begun after
    ``seconds``. ``warn`` hears of cuts that could not be measured; these have no "basis".

    Raises ServerUnavailable, and what ``on_progress`` raises.
    """
    cuts = [cut for cut in cloud.cuts if cut.name in books]
    if not cuts:
        return cloud
    timer = HeadTimer(loaded.wrapped, TimedInputs(loaded.wrapped, loaded.args, loaded.kwargs), Basis.name, books)
    found: dict[str, CodecProfile] = {}
    until, ids = time.monotonic() + seconds, itertools.count(1)
    try:
        with _connected(server, loaded, patience, credentials or Credentials()) as connection:
            for number, cut in enumerate(cuts):
                on_progress(number, len(cuts), f"{Basis.name} after {cut.name}")
                if time.monotonic() > until:
                    warn(f"{Basis.name} is not measured at {len(cuts) - number} of {len(cuts)} cuts, for want of time")
                    break
                try:
                    measured = _measure(connection, ids, timer, cut)
                except ServerUnavailable:
                    raise
                except IsthmusError as error:
                    warn(f"{Basis.name} is not measured at {cut.name}: {error}")
                    continue
                if measured is not None:
                    found[cut.name] = measured
    except Disagreement as error:  # for example a server without this codec
        warn(f"{Basis.name} is not measured: {error}")
    return replace(cloud, cuts=tuple(_with(cut, found.get(cut.name)) for cut in cloud.cuts))


def _with(cut: CutProfile, found: CodecProfile | None) -> CutProfile:
    return cut if found is None else replace(cut, codecs={**cut.codecs, Basis.name: found})


def _measure(connection: Connection, ids: Iterator[int], timer: HeadTimer, cut: CutProfile) -> CodecProfile | None:
    """None where the books code nothing of what crosses for these inputs."""
    early = timer.frontier(cut.name)
    parcel = timer.packed(early)
    if Basis.name not in parcel.codecs:
        return None
    outgoing = wire.outgoing(early, parcel)
    took = [_decoding(connection, next(ids), outgoing) for _ in range(1 + REQUESTS)][1:]
    return CodecProfile(len(parcel.header) + parcel.nbytes, Quartiles.of(took))


def _decoding(connection: Connection, request_id: int, outgoing: Outgoing) -> int:
    """Return nanoseconds that the server took to decode one request. Raises what it answers with, and
    DeadlineExceeded.
    """
    limit = ConnectionOptions().max_answer_bytes
    exchange = Exchange(
        request_id,
        outgoing,
        until=time.monotonic() + REQUEST_SECONDS,
        stamps=Stamps(),
        check_header=lambda header, nbytes: wire.check_answer(header, nbytes, limit),
        want_metrics=False,
    )
    connection.submit(exchange)
    if not exchange.wait():
        connection.cancel(exchange, DeadlineExceeded(f"no answer within {REQUEST_SECONDS:g} s"))
    if exchange.error is not None:
        raise exchange.error
    assert exchange.reply is not None
    return wire.server_times(exchange.reply.durations).decode


@contextmanager
def _connected(server: str, loaded: LoadedModel, patience: float, credentials: Credentials) -> Iterator[Connection]:
    wrapped = loaded.wrapped
    greeting = wire.hello_frame(
        client_id=uuid.uuid4().hex,
        model_id=loaded.spec.model_id,
        weights_hash=wrapped.weights_hash(),
        structure_digest=wrapped.structure_digest(),
        plan_digest="",  # profiles have been compared by theirs
        environment=wrapped.environment(),
        about={},
    )
    connection = Connection(server, greeting, ConnectionOptions(credentials=credentials), codec=Basis.name)
    try:
        connection.open(patience)
        yield connection
    finally:
        connection.close()


Say = Callable[[str], None]
PROBED_SIZES: Final = 6
LEAST_PROBED: Final = 64 << 10
"""Bytes without which goodput is only noise: the slope between two sizes that hardly differ."""
LONGEST_PAUSE: Final = 0.05
CORRECTION_ROUNDS: Final = 3
"""How often each cut is asked, after one request that does not count."""
CORRECTION_SHARE: Final = 0.5
"""The share of a profile's budget that all real requests may take."""
ANSWER_SECONDS: Final = 15.0
FILE_READINGS: Final = 5
THREADS_SHARE: Final = 0.1
"""The share of a profile's budget that the choice of the number of threads may take."""


@short
@dataclass(frozen=True)
class SurveySources:
    """Where to take it from; None = measured now (``server``: one of our own on loopback, which allows `observers`)."""

    server: str | None = None
    credentials: Credentials = field(default_factory=Credentials)
    """For ``server``."""
    edge_profile: str | None = None
    cloud_profile: str | None = None
    link: Link | None = None
    file: str | None = None
    """An input file: its preparation is measured, and the candidate that sends it unread is predicted."""
    warmup: int = 3
    repetitions: int = 10
    seconds: float = 20.0
    """Budget of each profile."""
    probe_seconds: float = 2.0
    codec: str = "raw"
    codecs: Codecs | None = None
    """Those to choose from with the cut; None: ``codec`` for all."""
    books: Mapping[str, Books] = field(default_factory=dict, repr=False)
    """By the name of a cut, what the codec "basis" sends its pieces by."""
    correct: bool = False
    choose_threads: bool = False
    """Where their number is not given: those with which the whole model is fastest, until the context ends."""
    edge_speed: float = 1.0
    """As `Gathered.edge_speed`."""
    observers: Sequence[str] = ()

    @property
    def measured(self) -> tuple[str, ...]:
        """The codecs that both profiles are to have."""
        return (self.codec,) if self.codecs is None else self.codecs.names


@short
@dataclass(frozen=True)
class Gathered:
    """All that `predict` takes. ``server`` is where it runs while the context lasts (None: none was needed)."""

    edge: Profile
    cloud: Profile
    link: Link
    load: Load
    file: FileInput | None = None
    file_crosses: bool = False
    """Whether the server reads files as this side does."""
    correction: Correction | None = None
    server: str | None = None
    server_is_ours: bool = False
    warnings: tuple[str, ...] = field(default=())
    codecs: Codecs | None = None
    edge_speed: float = 1.0
    """The speed of the device that is planned for, as a multiple of the one that was measured."""

    def candidates(
        self,
        link: Link | None = None,
        edge_factor: float = 1.0,
        server_factor: float = 1.0,
        *,
        power: GivenPower | None = None,
        keys: Collection[str] | None = None,
    ) -> list[Candidate]:
        """Return what `predict` makes of it; on another ``link``, or with either side's times multiplied, to ask what
        if.
        """
        return predict(
            self.edge,
            self.cloud,
            self.link if link is None else link,
            self.load,
            file=self.file,
            file_crosses=self.file_crosses,
            correction=self.correction,
            power=power,
            edge_factor=edge_factor / self.edge_speed,
            server_factor=server_factor,
            codecs=self.codecs,
            keys=keys,
        )


@contextmanager
def gather(loaded: LoadedModel, wanted: SurveySources, say: Say, progress: bool = False) -> Iterator[Gathered]:
    """Measure or read; a server of our own lives until the context ends. ``say`` gets one line at a time, for people.

    Raises SpecError (a file that is no profile, or one of another model or other weights), Disagreement (a server's),
    ServerUnavailable, UnknownModel.
    """

    found: list[str] = []

    def warn(text: str) -> None:
        found.append(text)
        say(f"warning: {text}")

    who = identity(loaded.wrapped, loaded.spec.model_id, loaded.plan_digest)
    with ExitStack() as stack:
        if wanted.choose_threads and loaded.choice.threads is None and wanted.edge_profile is None:
            loaded = stack.enter_context(_threads_chosen(loaded, THREADS_SHARE * wanted.seconds, say))
        # Files first: unusable ones are reported before anything is measured.
        if wanted.codecs is not None:
            wanted.codecs.check(who.weights_hash, who.structure_digest)
        edge = _read(wanted.edge_profile, "edge", who, _machine_of(loaded), wanted, warn)
        cloud = _read(wanted.cloud_profile, "cloud", who, None, wanted, warn)
        server, ours = wanted.server, False
        if server is None and (cloud is None or wanted.link is None or wanted.correct):
            say("starting a server on this machine: they share it, and the link is no network")
            server, ours = stack.enter_context(local_server(loaded.choice, observers=wanted.observers)), True
        credentials = Credentials() if ours else wanted.credentials
        real: _RealRequests | None = None
        if wanted.correct and server is not None:
            say("real requests, to see how far off predictions are")
            real = stack.enter_context(_RealRequests(loaded, wanted, server, credentials))
            real.measure()
        if edge is None:
            # A profile pauses before each measurement as long as a request waits for the network.
            pause = None if server is None else min(LONGEST_PAUSE, round_trip(server, credentials=credentials))
            edge = _measure_edge(loaded, wanted, pause, progress)
        if cloud is None:
            assert server is not None
            with bar("server's profile", None, progress) as advance:
                data = fetch_profile(
                    server,
                    who.model_id,
                    wanted.warmup,
                    wanted.repetitions,
                    wanted.seconds,
                    counted(advance, wanted.seconds),
                    codecs=measured_by_servers(wanted.measured),
                    weights_hash=who.weights_hash,
                    credentials=credentials,
                )
                cloud = profiles.from_json(data, "cloud", f"the profile that {server} sent")
                for text in profiles.check(cloud, who):
                    warn(text)
                if Basis.name in wanted.measured:
                    cloud = with_books(
                        cloud,
                        loaded,
                        wanted.books,
                        server,
                        warn,
                        counted(advance, wanted.seconds),
                        seconds=wanted.seconds,
                        credentials=credentials,
                    )
        for side, profile in (("edge", edge), ("cloud", cloud)):
            for text in profile.warnings:
                warn(f"{side}: {text}")
        if wanted.edge_speed != 1:
            edge = _of_another_speed(edge)
        served = None if server is None else _served(server, who, credentials)
        if wanted.cloud_profile is not None and server is not None:
            for text in _of_another_machine(cloud, who, server, served):
                warn(f"{wanted.cloud_profile}: {text}")
        link, load = wanted.link, Load()
        file = _file(edge, wanted.file, loaded)
        if link is None:
            assert server is not None
            with bar("probing the link", None, progress) as advance:
                answers = (0, cloud.answer_bytes, 4 * cloud.answer_bytes)
                link, load = probe(
                    server,
                    probe_sizes(edge, file),
                    answers,
                    wanted.probe_seconds,
                    counted(advance),
                    credentials=credentials,
                )
        reads = served is not None and served.preprocess_digest == loaded.spec.preprocess_digest()
        crosses = reads and file is not None
        if file is not None and server is not None and not crosses:
            warn("the server reads input files otherwise than this side: they cannot be sent as they are")
        for side, profile in (("edge", edge), ("cloud", cloud)):
            for text in _not_measured(side, profile, wanted):
                warn(text)
        known: dict[str, Any] = {"codecs": wanted.codecs, "edge_speed": wanted.edge_speed}
        gathered = Gathered(edge, cloud, link, load, file, crosses, None, server, ours, tuple(found), **known)
        if real is not None:
            real.measure()
            gathered = replace(gathered, correction=real.correction(gathered))
        yield gathered


def _of_another_speed(edge: Profile) -> Profile:
    """Return the profile of a device whose speed alone is known: without joules."""
    unknown = Reading.unavailable("the device that is planned for is not the one that was measured")
    cuts = tuple(replace(cut, energy=unknown) for cut in edge.cuts)
    return replace(edge, whole_energy=unknown, idle_power=unknown, cuts=cuts)


def edge_profile(loaded: LoadedModel, wanted: SurveySources, say: Say, progress: bool = False) -> Profile:
    """Return this side's profile alone, read or measured: where there is no server yet."""

    who = identity(loaded.wrapped, loaded.spec.model_id, loaded.plan_digest)
    if wanted.codecs is not None:
        wanted.codecs.check(who.weights_hash, who.structure_digest)
    read = _read(wanted.edge_profile, "edge", who, _machine_of(loaded), wanted, lambda text: say(f"warning: {text}"))
    found = read or _measure_edge(loaded, wanted, None, progress)
    for text in found.warnings:
        say(f"warning: edge: {text}")
    return found


@contextmanager
def _threads_chosen(loaded: LoadedModel, seconds: float, say: Say) -> Iterator[LoadedModel]:
    """``loaded`` with the number of threads that is fastest here."""
    before = set_threads(None)
    inputs = TimedInputs(loaded.wrapped, loaded.args, loaded.kwargs)
    count, took = machine.fastest_threads(loaded.wrapped, inputs, seconds)
    if count == before:
        yield loaded
        return
    tried = ", ".join(f"{ms:.1f} ms with {one}" for one, ms in took.items())
    say(f"planned with {count} of {before} threads: a forward takes {tried}; use {option('threads', count)}")
    try:
        set_threads(count)
        yield replace(loaded, choice=replace(loaded.choice, threads=count))
    finally:
        set_threads(before)


def probe_sizes(edge: Profile, file: FileInput | None) -> list[int]:
    """Nothing, some sizes that candidates send, smallest and largest among them, and `LEAST_PROBED` at least."""
    sizes = sorted({cut.wire_bytes for cut in edge.cuts} | ({file.nbytes} if file else set()))
    if len(sizes) > PROBED_SIZES:
        step = (len(sizes) - 1) / (PROBED_SIZES - 1)
        sizes = [sizes[round(at * step)] for at in range(PROBED_SIZES)]
    return sorted({0, *sizes, max([*sizes[-1:], LEAST_PROBED])})


def _not_measured(side: str, profile: Profile, wanted: SurveySources) -> list[str]:
    """Codecs that can be no candidates, because this side's profile does not have them."""
    known = {profile.settings.get("codec"), *(name for cut in profile.cuts for name in cut.codecs)}
    missing = [name for name in wanted.measured if name not in known] if wanted.codecs is not None else []
    if not missing:
        return []
    return [
        f"the {side}'s profile did not measure {', '.join(missing)}: not chosen; a new one, with more seconds, does"
    ]


def _read(
    path: str | None, side: Any, who: ModelIdentity, machine: Any, wanted: SurveySources, warn: Say
) -> Profile | None:

    if path is None:
        return None
    profile = profiles.read(path, side)
    if profile.side != side:
        raise SpecError(f"{path}: expected a profile of the {side}, found one of the {profile.side}")
    try:
        found = profiles.check(profile, who, machine)
    except Disagreement as error:
        raise SpecError(f"{path}: {error}") from error
    for text in found:
        warn(f"{path}: {text}")
    made, codec = profile.settings.get("codec"), wanted.codec
    if made != codec and wanted.codecs is None and not any(codec in cut.codecs for cut in profile.cuts):
        warn(f"{path}: the {side}'s profile was made with the codec {made}, requests use {codec}")
    return profile


def _machine_of(loaded: LoadedModel) -> Any:

    return machine.describe(_device(loaded))


def _device(loaded: LoadedModel) -> Any:
    import torch

    parameter = next(loaded.wrapped.model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _measure_edge(loaded: LoadedModel, wanted: SurveySources, pause: float | None, progress: bool) -> Profile:

    files = [Path(wanted.file)] if wanted.file else []
    how = ProfileOptions(
        wanted.warmup,
        wanted.repetitions,
        wanted.seconds,
        wanted.codec,
        codecs=wanted.measured,
        books=wanted.books,
        depth=loaded.choice.depth,
    )
    with bar("profiling", None, progress) as advance:
        return profile_edge(
            loaded.wrapped,
            loaded.spec.model_id,
            loaded.args,
            loaded.kwargs,
            how if pause is None else replace(how, pause=pause),
            files=files,
            prepare=loaded.spec.preprocess,
            on_progress=counted(advance, wanted.seconds),
        )


def _file(edge: Profile, path: str | None, loaded: LoadedModel) -> FileInput | None:
    """Return what the edge's profile knows of the file; else it is prepared a few times now."""
    if path is None:
        return None
    nbytes = Path(path).stat().st_size
    known = next((one for one in edge.files if (Path(one.name).name, one.nbytes) == (Path(path).name, nbytes)), None)
    if known is not None:
        return known
    took = []
    for _ in range(FILE_READINGS):
        began = time.perf_counter_ns()
        loaded.spec.preprocess(Path(path))
        took.append(time.perf_counter_ns() - began)
    return FileInput(path, Path(path).suffix.lower(), nbytes, Quartiles.of(took))


def models_of(server: str, credentials: Credentials | None = None) -> list[Any]:
    """Return what the server says of its models (`split_pb2.ModelInfo`); nothing where it says nothing."""
    import grpc

    with dial(server, credentials=credentials) as channel:
        list_models = channel.unary_unary(
            "/isthmus.v1.Split/ListModels",
            request_serializer=split_pb2.ListModelsRequest.SerializeToString,
            response_deserializer=split_pb2.ListModelsReply.FromString,
        )
        try:
            return list(list_models(split_pb2.ListModelsRequest(), timeout=ANSWER_SECONDS, wait_for_ready=True).models)
        except grpc.RpcError:
            return []


def _served(server: str, who: ModelIdentity, credentials: Credentials | None) -> Any:
    """Return what the server says of this model, of the version with these weights; None where it says nothing."""
    ids = [one for one in models_of(server, credentials) if who.model_id in (one.model_id, name_of(one.model_id))]
    return next((one for one in ids if one.weights_hash == who.weights_hash), ids[0] if ids else None)


def _of_another_machine(cloud: Profile, who: ModelIdentity, server: str, served: Any) -> list[str]:
    """Warnings about a profile from a file, where ``server`` may be another than the one it was made on."""

    try:
        there = json.loads(served.machine) if served is not None and served.machine else None
    except (ValueError, RecursionError):
        there = None
    if not isinstance(there, dict) or "id" not in there:
        return [f"{server} does not say on what machine it runs: whether the profile is of that is not known"]
    return profiles.check(cloud, who, there)


class _RealRequests:
    """The example, asked for at cuts all over the model, and computed here: `measure` is one batch."""

    def __init__(self, loaded: LoadedModel, wanted: SurveySources, server: str, credentials: Credentials) -> None:
        self._client = ClientCore(
            server,
            loaded.choice.with_spec(loaded.spec),
            codec=wanted.codec,
            metrics=False,
            connection=ConnectionOptions(credentials=credentials),
        )
        self._call = Call(loaded.args, loaded.kwargs)
        self._names = [EDGE_ONLY, *cuts_to_measure([one.name for one in loaded.cuts if one.can_split])]
        self._seconds = CORRECTION_SHARE * wanted.seconds / BATCHES
        self._batches: list[dict[str, float]] = []

    def __enter__(self) -> _RealRequests:
        self._client.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._client.__exit__(*error)

    def measure(self) -> None:
        """Rounds of requests, the first of which does not count. Where they take too long, only of the fastest ones."""
        began = time.monotonic()
        took: dict[str, list[float]] = {name: [] for name in self._names}
        for number in range(1 + CORRECTION_ROUNDS):
            for name in [*took]:
                try:
                    took[name].append(float(self._client.request(self._call, name).measured_ns))
                except (AccessRefused, CutRefused):  # this side may lack permission
                    del took[name]
            if number == 0 and (time.monotonic() - began) * CORRECTION_ROUNDS > self._seconds:
                took = dict(sorted(took.items(), key=lambda item: item[1])[:3])
        self._names = [*took]
        self._batches.append({name: statistics.median(rounds[1:]) for name, rounds in took.items()})

    def correction(self, gathered: Gathered) -> Correction | None:
        """Against what is predicted of tensors. None where this side may use no cut."""
        known = {one.name: one.latency_ns for one in replace(gathered, codecs=None, file=None).candidates()}
        measured = [item for batch in self._batches for item in batch.items() if item[0] in known]
        samples = [RequestSample(name, known[name], ns) for name, ns in measured]
        cuts = [one for one in samples if one.name != EDGE_ONLY]
        return Correction.fit(cuts, [one for one in samples if one.name == EDGE_ONLY]) if cuts else None
