"""The model on this side: loads, wraps and plans it; runs heads and packs what crosses."""

from __future__ import annotations

import itertools
import logging
import platform
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch
from torch import nn

from edge_client.call import Call
from edge_client.inputs import another_size, unfit
from edge_client.model_choice import ModelChoice
from edge_client.request.ahead import Ahead, PackedFrame, SentFrames, Way
from edge_client.transport import Exchange, Outgoing, Stamps, now_ns, wire
from edge_client.transport.times import LayerTables
from edge_client.user_text import CLOUD_FILE, CLOUD_ONLY, EDGE_ONLY, WORDS
from protos.isthmus.v1 import split_pb2
from shared_hooks import Crossing, EarlyOutput, LayerMetrics, Plan, WrappedModel, codecs
from shared_hooks.codecs import Codec
from shared_hooks.codecs.basis import Basis, Book, Frames
from shared_hooks.codecs.learned import LearnedCodec
from shared_hooks.codecs.registry import Guarded
from shared_hooks.errors import (
    CutRefused,
    Disagreement,
    InputMismatch,
    IsthmusError,
    ModelFailed,
    SpecError,
    UnknownLayer,
    near,
)
from shared_hooks.head import listening
from shared_hooks.lifecycle import Lifecycle, Stage
from shared_hooks.metrics import ForwardMetrics
from shared_hooks.models import InputItem, ModelSpec
from shared_hooks.models.images import check_suffix
from shared_hooks.models.inputs import inputs_of_text, to_device
from shared_hooks.modules import INPUT, holder_modules
from shared_hooks.modules.manifest import encode
from shared_hooks.observers import named, transforms
from shared_hooks.observers.named import Observations
from shared_hooks.observers.thumbnails import Texts
from shared_hooks.planning import OnlyPart
from shared_hooks.state.agreed import WEIGHTS, Agreed
from shared_hooks.tensors import classes_of, flatten, unflatten
from shared_hooks.tensors.staging import to_host, wait

if TYPE_CHECKING:
    from edge_client.choosing.chooser import Chooser


log = logging.getLogger(__name__)

Cut = int | str | tuple[int | str, ...]
"""A layer's id or name, a word of `user_text`, or several: a branch cut."""
Books = tuple[Book | None, ...]
"""Books of the pieces that cross one cut (`shared_hooks.crossing.books_of`)."""
CUTS: Final = 64
"""The number of remembered descriptions with books; each form of inputs has its own."""
NEAR: Final = 0.7
"""The similarity from which a split is taken for "auto" and the like rather than for a layer."""
Records = tuple[Sequence[LayerMetrics], ForwardMetrics | None]


@dataclass(frozen=True, slots=True)
class HeadResult:
    """The result of a head: what crosses as bytes, its cut, and what its layers' records are made of."""

    outgoing: Outgoing
    split: str
    layer_id: int
    records: Callable[[], Records] = lambda: ([], None)
    observations: Observations = field(default_factory=dict)
    transforms: tuple[str, ...] = ()
    frame: PackedFrame | None = None  # the symbols, where later frames may refer to them
    decoding_ns: float = 0.0  # the expected decoding time on the server, where codecs are chosen
    answer_bytes: int | None = None  # the largest possible answer of the model; None where no plan has it


@dataclass(frozen=True, slots=True)
class LocalRun:
    """The result of the whole model run here."""

    output: Any
    layers: Sequence[LayerMetrics]
    forward: ForwardMetrics | None
    observations: Observations = field(default_factory=dict)
    transforms: tuple[str, ...] = ()


class Learnt(Protocol):
    """What a calibration knows of cuts (`edge_client.planning.codecs.LossTable`)."""

    @property
    def books(self) -> Mapping[str, Books]:
        """By the name of a cut."""

    def check(self, weights_hash: str, structure_digest: str) -> None:
        """Raise SpecError if it belongs to other weights."""


class EdgeModel:
    """A wrapped model on a device."""

    spec: ModelSpec | None = None
    only_head: OnlyPart | None = None

    def __init__(
        self,
        choice: ModelChoice,
        *,
        codec: str = "raw",
        chooser: Chooser | None = None,
        learnt: Learnt | None = None,
        metrics: bool = True,
        observers: Iterable[str] = (),
        lifecycle: Lifecycle | None = None,
    ) -> None:
        self.codec = codecs.check(codec)
        self.layer_tables = LayerTables()
        self.chooser = chooser
        self._learnt = learnt
        self.books: dict[str, Books] = {} if learnt is None else dict(learnt.books)
        self.frames = SentFrames()
        self._with_books: dict[str, Crossing] = {}
        self._looked_at: set[str] = set()
        self.failed: set[str] = set()
        """Other packages' codecs that failed on the server: what they were used for is sent raw."""
        self.device = device = choice.set_up()
        self.observers = named.check(observers)
        self._texts: Texts | None = None
        self.lifecycle = Lifecycle("edge") if lifecycle is None else lifecycle
        model, model_id, example = choice.model, choice.model_id, choice.example
        if isinstance(example, str):  # a spec's path is relative to the spec
            example = inputs_of_text(example) if isinstance(model, nn.Module) else None
        if not isinstance(model, nn.Module):
            self.spec = choice.spec()
            model_id = model_id or self.spec.model_id
        elif model_id is None:
            raise SpecError("model_id is missing: a module does not say what the server calls it")
        self.observe(self.observers)
        self.model_id: str = model_id
        self.lifecycle.emit(Stage.BEFORE_MODEL_LOAD, model_id=model_id)
        if isinstance(model, nn.Module):
            if choice.only_head is not None:
                raise SpecError("only_head leaves weights in the files of a spec; a module has all of them in memory")
            module = model.to(device)
        else:
            assert self.spec is not None
            if choice.only_head is None:
                module = self.spec.load_model(device)
            elif device.type != "cpu":
                raise SpecError(f"only_head leaves weights in their files, for the CPU; this model is for {device}")
            else:
                module, weights = self.spec.load_mapped()
                self.only_head = OnlyPart(module, weights, None, choice.only_head, refuses=True)
            example = example or self.spec.example(device)
        self.wrapped = WrappedModel(module, metrics=metrics, lifecycle=self.lifecycle, loads=self.only_head)
        self.lifecycle.emit(Stage.AFTER_MODEL_LOAD, model_id=model_id, wrapped=self.wrapped)
        self.example = example
        self.find = classes_of(holder_modules(module))
        self._preprocess_digest: str | None = None
        self._agreed = Agreed(module) if self.only_head is None else None
        """None if weights are loaded from files as it runs."""

    def observe(self, names: Iterable[str]) -> None:
        """Set the observers of every run from now on; of tokens with text, if the spec names a tokenizer. Raises
        SpecError.
        """
        names = named.check(names)
        if "tokens" in names and self._texts is None and self.spec is not None and self.spec.tokenizer is not None:
            self._texts = Texts(self.spec.load_tokenizer())
        self.observers = names

    def observed(
        self,
        names: Sequence[str],
        edge: Observations,
        cloud: bytes | None = None,
        parts: Iterable[split_pb2.Part] = (),
    ) -> dict[str, Observations]:
        """Return what the observers ``names`` of a request found, by side, tokens with their text; empty without
        observers.

        ``cloud``: as received; None if no server took part. ``parts``: of further servers of a chain, which have the
        server's name. Raises BadFrame.
        """
        if not names:
            return {}
        sides = {"edge": edge} if cloud is None else {"edge": edge, "cloud": named.from_bytes(cloud, names)}
        sides |= {part.server: named.from_bytes(part.observations, names) for part in parts}
        if self._texts is not None:
            for found in sides.values():
                named.add_token_text(found, self._texts)
        return sides

    def greeting(self, client_id: str) -> split_pb2.ClientFrame:
        """Return the hello: plans the example and hashes the weights, on which the server must agree.

        Raises SpecError for a calibration, or a learned codec, of other weights.
        """
        weights_hash, structure_digest = self.wrapped.weights_hash(), self.wrapped.structure_digest()
        if self._agreed is not None:
            self._agreed.agree(weights_hash)
            self.check_unchanged()  # what follows relies on the model as it was wrapped
        if self.chooser is not None:
            self.chooser.codecs.check(weights_hash, structure_digest)
        if self._learnt is not None:
            self._learnt.check(weights_hash, structure_digest)
        if isinstance(own := codecs.CODECS[self.codec], LearnedCodec):
            own.check_model(weights_hash)
        return wire.hello_frame(
            client_id=client_id,
            model_id=self.model_id,
            weights_hash=weights_hash,
            structure_digest=structure_digest,
            plan_digest=self.plan_example(),
            environment=self.wrapped.environment(),
            about={"torch": torch.__version__, "python": platform.python_version(), "device": str(self.device)},
        )

    def check_unchanged(self, call: Call | None = None, cut: Cut = "") -> None:
        """Raise Disagreement if the model was changed since it was wrapped, or its weights since the hello, because the
        server's differ; and CutRefused if a module of a ``call`` that runs behind the ``cut`` has got a hook.
        """
        if self._agreed is None or self._agreed.is_same:
            return
        if changed := self._agreed.changed():
            since = "the server agreed" if changed == WEIGHTS else "this client was made"
            raise Disagreement(
                f'{changed} of "{self.model_id}" changed here since {since}: the server has it as it was. Give it the '
                "changed model, and make a client of that"
            )
        if call is None or not (hooked := {*self._agreed.hooked()}):
            return
        paths = {path for path, module in self.wrapped.model.named_modules() if module in hooked}
        plan = self._planned(call)
        position = plan.position(cut)
        for one in plan.trace.calls:
            if one.path in paths and one.exit >= position:
                raise CutRefused(
                    f"a hook on {one.path or 'the model'} would have to run on the server, behind the cut: put it on a "
                    "module before the cut, or use observers"
                )

    def manifest(self) -> bytes | None:
        """Return the facts behind the hello's digests; None if they are too large for the wire."""
        return encode(self.wrapped.manifest(None if self.example is None else self._planned(Call(*self.example))))

    def plan_example(self) -> str:
        """Plan the spec's example; returns the plan's digest, "" without an example."""
        return "" if self.example is None else self.plan(Call(*self.example))

    def check_cut(self, cut: Cut) -> None:
        """Check that the example, if there is one, can be cut there. Raises UnknownLayer, CutRefused."""
        if self.example is not None and cut not in WORDS:
            args, kwargs = self._placed(Call(*self.example))
            try:
                self.wrapped.check_cut(cut, *args, **kwargs)
            except UnknownLayer as error:
                raise _with_words(error, cut) from None

    def check_cuts(self, cuts: Sequence[Cut]) -> None:
        """As `check_cut` for a chain: each cut, and that each comes after the previous one."""
        for cut in cuts if self.only_head is None else cuts[:1]:  # later cuts need weights that are not here
            self.check_cut(cut)
        if self.example is not None:
            plan = self._planned(Call(*self.example))
            for first, second in itertools.pairwise("input" if cut == CLOUD_ONLY else cut for cut in cuts):
                if plan.position(second) <= plan.position(first):
                    raise CutRefused(f"a chain's cuts come one behind the other: {second} is not behind {first}")

    def name_of(self, cut: Cut) -> str:
        """Return the name of a layer or block. Raises UnknownLayer."""
        if isinstance(cut, str):
            return cut
        self.plan_example()
        found = self.wrapped.resolve(cut)
        return INPUT if found is None else found.name

    def plan(self, call: Call) -> str:
        """Plan this call, or add its path; returns the plan's digest. Raises InputMismatch, ModelFailed."""
        return self._planned(call).digest

    def _planned(self, call: Call) -> Plan:
        args, kwargs = self._placed(call)
        try:
            return self.wrapped.plan(*args, **kwargs)
        except IsthmusError:
            raise
        except Exception as error:
            raise self._failed(error, self.model_id, args, kwargs) from error

    def head(
        self,
        call: Call,
        cut: Cut,
        stamps: Stamps,
        offered: Collection[str] = wire.FIRST_CODECS,
        codec: str = "",
        ahead: Ahead | None = None,
    ) -> HeadResult:
        """Run the model up to ``cut`` and pack what crosses; stamps `computed` and `packed`.

        ``offered``: the server's codecs, ``codec``: chosen with the cut, if codecs are chosen. ``ahead`` sends early
        what is final.

        Raises UnknownLayer, CutRefused, InputMismatch, and ModelFailed with the model's error as cause.
        """
        self.check_unchanged(call, cut)
        early: EarlyOutput
        try:
            with listening(ahead):
                early, observations, changed = self._run(partial(self.wrapped.head, cut), "head", call, stamps)
        except UnknownLayer as error:
            raise _with_words(error, cut) from None
        finally:
            if self._agreed is not None:
                self._agreed.ran()
        records = self.wrapped.last_records()
        stamps.computed = now_ns()
        if ahead is not None:
            stamps.ahead_ns, stamps.head_ns = ahead.took_ns, stamps.head_ns - ahead.took_ns
        self.lifecycle.emit(Stage.BEFORE_ENCODE, value=early)
        early = replace(early, crossing=self._with_own(early.crossing))
        frame = None
        if self.chooser is not None:
            known = [name for name in offered if name not in self.failed]
            packing: Sequence[Codec] = self.chooser.choose(early, known, codec or None)
        elif self.codec == Frames.name:
            packing, frame = self.frames.codecs(early)
        else:
            packing = self._codecs(early.crossing, [self.codec] * len(early.pieces))
        parcel = None if ahead is None or frame is not None else ahead.parcel(early, packing)
        outgoing = wire.outgoing(early, early.pack(packing) if parcel is None else parcel)
        decoding_ns = 0.0 if self.chooser is None else self.chooser.decoding_ns(early, outgoing.codecs)
        self.lifecycle.emit(Stage.AFTER_ENCODE, nbytes=outgoing.nbytes)
        stamps.packed = now_ns()
        most = self.wrapped.most_output_bytes(*call.args, **call.kwargs)
        name, number = early.layer_name, early.layer_id
        return HeadResult(outgoing, name, number, records, observations, changed, frame, decoding_ns, most)

    def way(self, crossing: Crossing, codec: str = "") -> Way | None:
        """Return how a cut's values will be packed, if that is known in advance. ``codec``: as for `head`."""
        if self.device.type != "cpu" or (self.chooser is None and self.codec == Frames.name):
            return None
        crossing = self._with_own(crossing)
        names: Sequence[str] | None = [self.codec] * len(crossing.grains)
        if self.chooser is not None:
            names = self.chooser.held(crossing.name)
        if names is None or len(names) != len(crossing.grains) or (codec and not {*names} <= {codec, codecs.RAW.name}):
            return None
        return crossing, self._codecs(crossing, names)

    def _codecs(self, crossing: Crossing, names: Sequence[str]) -> list[Codec]:
        """Return the codecs of the pieces by name, with their books."""
        bound: Sequence[Mapping[str, Codec]] = crossing.bound or [{}] * len(names)
        return [
            codecs.RAW if name in self.failed else own.get(name) or codecs.CODECS[name].at(crossing.name, number)
            for number, (own, name) in enumerate(zip(bound, names, strict=True))
        ]

    def codec_failed(self, names: Iterable[str], why: str) -> None:
        """Stop using another package's codec that failed on the server: what it was used for is sent raw."""
        found = {name for name in names if isinstance(codecs.CODECS.get(name), Guarded)} - self.failed
        self.failed |= found
        for name in sorted(found):
            log.warning("codec %s is not used any more, and the request is sent without it: %s", name, why)

    def _with_own(self, crossing: Crossing) -> Crossing:
        """Return the cut with this side's books for it."""
        cut = crossing.name
        books = self.books.get(cut)
        if books is not None:
            return self._by_books(crossing, books)
        if self.chooser is None and cut not in self._looked_at:
            self._looked_at.add(cut)
            if how := self._needs(cut):
                text = "codec %s: nothing was learnt of the cut after %s, so all goes raw there: %s"
                log.warning(text, self.codec, cut, how)
        return crossing

    def _needs(self, cut: str) -> str | None:
        """Return what the codec of all requests lacks at a cut; None: nothing."""
        if self.codec in (Basis.name, Frames.name):
            return f"a calibration (edge-client calibrate --cuts {cut}) says how"
        own = codecs.CODECS[self.codec]
        if isinstance(own, LearnedCodec) and own.file.cut != cut:
            return f"it is for the cut after {own.file.cut} (edge-client learn --split {cut} makes one)"
        return None

    def _by_books(self, crossing: Crossing, books: Books) -> Crossing:
        """Return the cut with its books, cached; unchanged if other pieces cross than when these were learned."""
        known = self._with_books.get(crossing.digest)
        if known is None or known.books is not books:
            known = crossing.with_books(books) if len(books) == len(crossing.grains) else crossing
            if len(self._with_books) >= CUTS:
                self._with_books.clear()
            self._with_books[crossing.digest] = known
        return known

    def whole(self, call: Call, stamps: Stamps) -> LocalRun:
        """Run the whole model; stamps `computed` and `unpacked`. Raises as `head` does."""
        if self.only_head is not None:
            raise SpecError(f"the whole model cannot run here: only {self.only_head} are loaded")
        self.lifecycle.emit(Stage.BEFORE_HEAD, split=EDGE_ONLY)
        output, observations, changed = self._run(self.wrapped.whole, "whole", call, stamps)
        layers, forward = self.wrapped.last_records()()  # before hooks, which may run the model
        self.lifecycle.emit(Stage.AFTER_HEAD, split=EDGE_ONLY, output=output)
        stamps.computed = now_ns()
        if self.device.type != "cpu":
            structure, tensors = flatten(output)
            output = unflatten(structure, [to_host(tensor) for tensor in tensors], self.find)
        stamps.unpacked = now_ns()
        return LocalRun(output, layers, forward, observations, changed)

    def file(self, path: Path, stamps: Stamps) -> HeadResult:
        """Read and pack an input file as it is. Raises SpecError without a spec, InputMismatch, and Disagreement."""
        if self.spec is None:
            raise SpecError("a client made with a module has no spec to say how the server reads input files")
        self.check_unchanged()
        suffix = check_suffix(path.suffix)
        try:
            data = np.fromfile(path, dtype=np.uint8)
        except OSError as error:
            raise InputMismatch(f"{path} cannot be read: {error.strerror or error}") from error
        stamps.computed = now_ns()
        if self._preprocess_digest is None:
            self._preprocess_digest = self.spec.preprocess_digest()
        self.lifecycle.emit(Stage.BEFORE_ENCODE, value=path)
        outgoing = wire.outgoing_file(torch.from_numpy(data), suffix, self._preprocess_digest)
        self.lifecycle.emit(Stage.AFTER_ENCODE, nbytes=outgoing.nbytes)
        stamps.packed = now_ns()
        return HeadResult(outgoing, CLOUD_FILE, -1)

    def read(self, path: Path) -> Call:
        """Read an input file as the spec says. Raises SpecError without a spec, and what the spec raises."""
        if self.spec is None:
            raise SpecError("a client made with a module has no spec to say how input files are read")
        return Call(*self.spec.preprocess(InputItem(path)))

    def output(self, exchange: Exchange) -> Any:
        """Return the model's output from an answered exchange, on the CPU."""
        self.lifecycle.emit(Stage.BEFORE_DECODE, nbytes=len(exchange.payload))
        value = wire.answer_value(exchange, self.find)
        self.lifecycle.emit(Stage.AFTER_DECODE, value=value)
        return value

    def _run(
        self, forward: Callable[..., Any], part: str, call: Call, stamps: Stamps
    ) -> tuple[Any, Observations, tuple[str, ...]]:
        """Run the head or the whole model; returns the result, what was observed, and the modules that a Transform may
        have changed. Its time goes to ``stamps.head_ns``.
        """
        args, kwargs = self._placed(call)
        observations: Observations = {}
        try:
            with transforms.during(self.wrapped) as changed:
                if self.observers:
                    with named.observing(self.wrapped, self.observers) as found:
                        output = forward(*args, **kwargs)
                        observations = found()
                else:
                    output = forward(*args, **kwargs)
                names = changed()
            returned = now_ns()
            wait(self.device)  # otherwise the device's time would count as encoding
        except IsthmusError:
            raise
        except Exception as error:
            what = f"the head of {self.model_id}" if part == "head" else self.model_id
            raise self._failed(error, what, args, kwargs) from error
        stamps.head_ns = self.wrapped.durations().get(part, 0) + now_ns() - returned
        return output, observations, names

    def _failed(self, error: Exception, what: str, args: Any, kwargs: Any) -> IsthmusError:
        """Return the error to raise if the model raised ``error``: InputMismatch if the inputs explain it, else
        ModelFailed.
        """
        model, inputs = self.wrapped.model, (args, kwargs)
        if (wrong := unfit(model, inputs, self.example, error)) is not None:
            return wrong
        more = another_size(model, inputs, self.example)
        return ModelFailed(f"{what} raised {type(error).__name__}: {error}{more}")

    def _placed(self, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = call.args, dict(call.kwargs)
        if self.device.type == "cpu":
            return args, kwargs
        return to_device(args, self.device), to_device(kwargs, self.device)


def _with_words(error: UnknownLayer, cut: Cut) -> UnknownLayer:
    """Return the error with similar words that are no layers, which the engine does not know."""
    hint = near(cut, (*WORDS, "input"), NEAR) if isinstance(cut, str) else ""
    return UnknownLayer(f"{str(error).partition(' Did you mean')[0]}{hint}") if hint else error
