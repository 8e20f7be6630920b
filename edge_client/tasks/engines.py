"""Time heads in other engines than eager PyTorch, for plans of devices that run them."""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from edge_client.credentials import Credentials
from edge_client.light import LightClient
from edge_client.planning.objective import Candidate, Decision
from edge_client.survey import Say
from edge_client.tasks.export import FIXED, WHOLE, Writer, apart
from edge_client.tasks.subject import Subject
from edge_client.user_input import LoadedModel
from edge_client.user_text import EDGE_ONLY, option
from shared_hooks import devices
from shared_hooks.batching.sizes import BATCH
from shared_hooks.errors import IsthmusError, SpecError, near
from shared_hooks.mapping import onnx_export
from shared_hooks.mapping.onnx_export import outputs_of
from shared_hooks.mapping.onnx_heads import TapedHead
from shared_hooks.mapping.tape import TapeReplay
from shared_hooks.metrics import Reading
from shared_hooks.profiling.profile import Profile, Quartiles

TORCH: Final = "torch"
ONNXRUNTIME: Final = "onnxruntime"
COMPILE: Final = "compile"
AOTINDUCTOR: Final = "aotinductor"
ENGINES: Final = (TORCH, ONNXRUNTIME, COMPILE, AOTINDUCTOR)
FEWEST: Final = 5
"""Minimum number of timed runs of a head."""


@dataclass(frozen=True)
class EnginePlan:
    """A plan with heads in one engine. ``differences``: the largest error of what crosses (onnxruntime: of the answer)
    as a share of the largest magnitude, by cut; ``refused``: cuts that it cannot run, and why.
    """

    engine: str
    decision: Decision
    candidates: Sequence[Candidate]
    differences: Mapping[str, float]
    refused: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        return {
            "decision": self.decision.as_dict(),
            "candidates": [one.as_dict() for one in self.candidates],
            "differences": dict(self.differences),
            "refused": dict(self.refused),
        }


@dataclass(frozen=True)
class EngineTimes:
    """Times in ns: of ``heads`` by cut, and of the ``whole`` model."""

    engine: str
    heads: Mapping[str, Quartiles]
    whole: Quartiles | None
    differences: Mapping[str, float]
    refused: Mapping[str, str]

    def profile(self, edge: Profile) -> Profile:
        """Return the edge's profile with these times in place of eager heads'. Their energy is unknown."""
        cuts = [
            replace(one, stages={**one.stages, "head": self.heads[one.name]}, energy=self._unknown, estimated="")
            for one in edge.cuts
            if one.name in self.heads
        ]
        first = [one for one in edge.cuts if one.layer_id < 0]
        return replace(edge, cuts=(*first, *cuts))

    def usable(self, candidates: Sequence[Candidate], speed: float = 1.0) -> list[Candidate]:
        """Return candidates with the whole model in this engine on the edge, ``speed`` times as fast, if that was
        timed.
        """
        found = []
        for one in candidates:
            if one.name != EDGE_ONLY:
                found.append(one)
            elif self.whole is not None:
                stages = {**one.stages_ns, "edge": self.whole.middle / speed}
                throughput = 1e9 / max(1.0, sum(stages.values()))
                changed = replace(
                    one, stages_ns=stages, edge_energy=self._unknown, interval_ns=None, throughput=throughput
                )
                found.append(changed)
        return found

    @property
    def _unknown(self) -> Reading:
        return Reading.unavailable(f"heads in {self.engine} were timed, and nothing else")


def engines_of(words: str | Sequence[str]) -> tuple[str, ...]:
    """Parse engines' names. Raises SpecError for an unknown one."""
    names = words.split(",") if isinstance(words, str) else list(words)
    found = tuple(dict.fromkeys(name.strip() for name in names))
    for name in found:
        if name not in ENGINES:
            raise SpecError(f"{option('engine')}={name!r}: must be of {', '.join(ENGINES)}.{near(name, ENGINES)}")
    if ONNXRUNTIME in found:
        onnx_export.check()
    return found


def measure(
    engine: str, loaded: LoadedModel, subject: Subject, cuts: Sequence[str], seconds: float, say: Say
) -> EngineTimes:
    """Time an engine's heads at ``cuts``, in that order, within ``seconds`` overall. Raises SpecError."""
    if not devices.is_host(loaded.wrapped.device):
        raise SpecError(f"{option('engine')}={engine}: heads are timed on the CPU; the model is on another device")
    say(f"heads in {engine}, timed")
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="isthmus-engine-") as folder:
        writer = Writer(loaded, subject, Path(folder))
        return (_in_onnxruntime if engine == ONNXRUNTIME else _compiled)(engine, writer, cuts, until, say)


def _in_onnxruntime(engine: str, writer: Writer, cuts: Sequence[str], until: float, say: Say) -> EngineTimes:
    try:
        found = writer.write(cuts, True, FIXED)
        whole = True
    except IsthmusError as error:
        say(f"the whole model is not in {engine}: {error}")
        found = writer.write(cuts, False, FIXED)
        whole = False
    feeds = writer.feeds()
    heads: dict[str, Quartiles] = {}
    left = [one for one in found.heads if not one.refused]
    for number, one in enumerate(left):
        share = (until - time.monotonic()) / (len(left) - number + whole)
        heads[one.cut] = _timed(_session(writer.folder / one.file, feeds), share)
    return EngineTimes(
        engine,
        heads,
        _timed(_session(writer.folder / WHOLE, feeds), max(0.0, until - time.monotonic())) if whole else None,
        {one.cut: one.difference for one in left},
        {one.cut: one.refused for one in found.heads if one.refused},
    )


def _session(file: Path, feeds: Mapping[str, Any]) -> Callable[[], Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    taken = {one.name: feeds[one.name] for one in session.get_inputs()}
    return lambda: session.run(None, taken)


def _compiled(engine: str, writer: Writer, cuts: Sequence[str], until: float, say: Say) -> EngineTimes:
    heads: dict[str, Quartiles] = {}
    differences: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name in cuts:
        if time.monotonic() > until:
            refused[name] = "there was no time left to compile it"
            continue
        try:
            head = writer.taped_head(name)
            eager, run = _made(engine, head, writer)
            differences[name] = max((apart(a, b) for a, b in zip(run(), eager, strict=True)), default=0.0)
            heads[name] = _timed(run, (until - time.monotonic()) / 10)
        except IsthmusError as error:
            refused[name] = f"{error}"
        except Exception as error:  # a compiler has no single class for its failures
            refused[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return EngineTimes(engine, heads, None, differences, refused)


def _made(
    engine: str, head: TapedHead, writer: Writer
) -> tuple[Sequence[torch.Tensor], Callable[[], Sequence[torch.Tensor]]]:
    """Return eager PyTorch's result, and the compiled head."""
    replay, tensors = TapeReplay(head.tape, head.wanted).eval(), tuple(writer.samples[0])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager = replay(*tensors)
        program = torch.export.export(replay, tensors, strict=False)
        if engine == AOTINDUCTOR:
            from torch._inductor import aoti_compile_and_package, aoti_load_package

            made: Any = aoti_load_package(
                aoti_compile_and_package(program, package_path=str(writer.folder / f"{len(head.tape.steps)}.pt2"))
            )
        else:
            made = torch.compile(program.module(), dynamic=False)

    def run() -> Sequence[torch.Tensor]:
        with torch.no_grad():
            found = made(*tensors)
        return [found] if isinstance(found, torch.Tensor) else list(found)

    run()
    return eager, run


def _timed(run: Callable[[], Any], seconds: float) -> Quartiles:
    """Time runs in nanoseconds: at least `FEWEST`, after two for warm-up."""
    run()
    run()
    return Quartiles.of(list(_runs(run, seconds)))


def _runs(run: Callable[[], Any], seconds: float) -> Iterator[float]:
    until, count = time.monotonic() + seconds, 0
    while count < FEWEST or (time.monotonic() < until and count < 200):
        began = time.perf_counter_ns()
        run()
        yield float(time.perf_counter_ns() - began)
        count += 1


# A sweep's requests: through a head in onnxruntime, and the server's tail by name.


def asked(
    server: str,
    subject: Subject,
    cuts: Sequence[str],
    warmup: int,
    repetitions: int,
    credentials: Credentials,
) -> dict[str, Any]:
    """Measure requests with heads in an engine: median times in ns by cut, as JSON data.

    ``refused``: cuts without a head or a tail, and why.
    """
    found: dict[str, Any] = {"cuts": {}, "refused": {}}
    loaded = subject.load(shallow=True)
    with loaded.wrapped as wrapped, tempfile.TemporaryDirectory(prefix="isthmus-engine-") as folder:
        try:
            writer = Writer(loaded, subject, Path(folder))
            heads = writer.write(cuts, False, BATCH).heads
        except IsthmusError as error:
            return {"cuts": {}, "refused": dict.fromkeys(cuts, f"{error}")}
        found["refused"] |= {one.cut: one.refused for one in heads if one.refused}
        wholes = []
        for tensors in writer.given:
            args, kwargs = writer.call(tensors)
            wholes.append(outputs_of(wrapped.whole(*args, **kwargs))[1])
        for head in heads:
            if head.refused:
                continue
            with LightClient(server, folder, head.cut, credentials=credentials) as client:
                try:
                    found["cuts"][head.cut] = _requests(client, writer, wholes, warmup, repetitions)
                except IsthmusError as error:
                    found["refused"][head.cut] = f"{error}"
    return found


def _requests(
    client: LightClient, writer: Writer, wholes: Sequence[Sequence[torch.Tensor]], warmup: int, repetitions: int
) -> dict[str, Any]:
    answers, off = [], 0.0
    for tensors, wanted in zip(writer.given, wholes, strict=True):
        arrays = [one.contiguous().numpy() for one in tensors]
        for _ in range(warmup):
            client.infer(*arrays)
        answers += [client.infer(*arrays) for _ in range(repetitions)]
        outputs = [torch.from_numpy(one.copy()) for one in answers[-1].outputs.values()]
        off = max([off, *(apart(a, b) for a, b in zip(outputs, wanted, strict=True))])
    return {
        "latency_ns": statistics.median(one.end_to_end_ns for one in answers),
        "head_ns": statistics.median(one.head_ns for one in answers),
        "bytes_up": statistics.median(one.bytes_up for one in answers),
        "difference": off,
        "requests": len(answers),
    }


def in_words(name: str, measured: Mapping[str, Any]) -> str:
    """Summarise a sweep's requests with heads in an engine."""
    cuts, refused = measured["cuts"], measured["refused"]
    left = f"; not at {len(refused)} cuts, such as {next(iter(refused.values()))[:90]}" if refused else ""
    if not cuts:
        return f"heads in {name}: none was asked{left}"
    best = min(cuts, key=lambda cut: cuts[cut]["latency_ns"])
    one = cuts[best]
    took = f"{one['latency_ns'] / 1e6:.2f} ms, head {one['head_ns'] / 1e6:.2f} ms, off by {one['difference']:.1e}"
    return f"heads in {name}: {best} is the best cut, {took}{left}"
