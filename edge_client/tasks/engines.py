"""Heads in other engines than eager PyTorch, timed: what a plan says of a device that runs them."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from edge_client.planning.objective import Candidate, Decision
from edge_client.spoken import EDGE_ONLY, option
from edge_client.survey.gather import Say
from edge_client.survey.loading import Loaded
from edge_client.tasks.export import FIXED, WHOLE, Writer, apart
from edge_client.tasks.subject import Subject
from shared_hooks import devices
from shared_hooks.errors import IsthmusError, SpecError, near
from shared_hooks.mapping import onnx_export
from shared_hooks.mapping.onnx_heads import TapedHead
from shared_hooks.mapping.tape import Replay
from shared_hooks.metrics import Reading
from shared_hooks.profiling.profile import Profile, Quartiles

TORCH: Final = "torch"
ONNXRUNTIME: Final = "onnxruntime"
COMPILE: Final = "compile"
AOTINDUCTOR: Final = "aotinductor"
ENGINES: Final = (TORCH, ONNXRUNTIME, COMPILE, AOTINDUCTOR)
FEWEST: Final = 5
"""Runs of a head that are timed, at least."""


@dataclass(frozen=True)
class EnginePlan:
    """What a plan is with heads in one engine. ``differences``: the largest element of what crosses (onnxruntime: of
    the answer) by which it is off, as a share of the largest magnitude, by cut; ``refused``: cuts that it does not
    run, and why.
    """

    engine: str
    decision: Decision
    candidates: Sequence[Candidate]
    differences: Mapping[str, float]
    refused: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "decision": self.decision.as_dict(),
            "candidates": [one.as_dict() for one in self.candidates],
            "differences": dict(self.differences),
            "refused": dict(self.refused),
        }


@dataclass(frozen=True)
class EngineTimes:
    """``heads`` by cut, and the ``whole`` model, in ns."""

    engine: str
    heads: Mapping[str, Quartiles]
    whole: Quartiles | None
    differences: Mapping[str, float]
    refused: Mapping[str, str]

    def profile(self, edge: Profile) -> Profile:
        """The edge's profile with these in place of eager heads. What they take of energy is not known."""
        unknown = Reading.unavailable(f"heads in {self.engine} were timed, and nothing else")
        cuts = [
            replace(one, stages={**one.stages, "head": self.heads[one.name]}, energy=unknown, estimated="")
            for one in edge.cuts
            if one.name in self.heads
        ]
        first = [one for one in edge.cuts if one.layer_id < 0]
        return replace(edge, cuts=(*first, *cuts), bare_ns=self.whole or edge.bare_ns, whole_energy=unknown)

    def usable(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Without those that this engine has no time of."""
        return [one for one in candidates if not (one.name == EDGE_ONLY and self.whole is None)]


def engines_of(words: str | Sequence[str]) -> tuple[str, ...]:
    """Raises SpecError for one that is none."""
    names = words.split(",") if isinstance(words, str) else list(words)
    found = tuple(dict.fromkeys(name.strip() for name in names))
    for name in found:
        if name not in ENGINES:
            raise SpecError(f"{option('engine')}={name!r}: must be of {', '.join(ENGINES)}{near(name, ENGINES)}")
    if ONNXRUNTIME in found:
        onnx_export.check()
    return found


def measure(
    engine: str, loaded: Loaded, subject: Subject, cuts: Sequence[str], seconds: float, say: Say
) -> EngineTimes:
    """Time an engine's heads at these cuts, in this order, for so many seconds in all. Raises SpecError."""
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
        except Exception as error:  # a compiler has no class of its own for all that may fail in it
            refused[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return EngineTimes(engine, heads, None, differences, refused)


def _made(
    engine: str, head: TapedHead, writer: Writer
) -> tuple[Sequence[torch.Tensor], Callable[[], Sequence[torch.Tensor]]]:
    """What eager PyTorch gives, and the compiled head."""
    replay, tensors = Replay(head.tape, head.wanted).eval(), tuple(writer.samples[0])
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
    """A run's nanoseconds: `FEWEST` runs at least, after two."""
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
