"""`EdgeClient`: run a model up to a cut here, the rest on a server, and get the model's own output."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, overload

import torch
from torch import nn

from edge_client.answer import Answer, Failure
from edge_client.call import Call
from edge_client.core import CONNECTION_ERRORS, ClientCore
from edge_client.inputs import InputReader, Swallowed, several
from edge_client.model_choice import Inputs, ModelChoice
from edge_client.request import (
    Cut,
    Pending,
    Position,
    Route,
    closing_with,
    in_order,
    work_of,
)
from edge_client.transport import ConnectionOptions, Stamps, now_ns
from edge_client.user_text import AUTO, CLOUD_FILE, EDGE_ONLY, LEAST
from protos.isthmus.v1.split_pb2 import Hop
from shared_hooks import codecs
from shared_hooks.codecs.basis import Basis, Frames
from shared_hooks.codecs.learned import LearnedCodec
from shared_hooks.errors import Cancelled, IsthmusError, SpecError, near
from shared_hooks.lifecycle import Lifecycle, Stage
from shared_hooks.models import InputItem, ModelSpec, Prediction
from shared_hooks.planning import members
from shared_hooks.showing import summary_of

if TYPE_CHECKING:
    from typing_extensions import Self

    from edge_client.adaptive import AutoClient, AutoOptions
    from edge_client.adaptive.chain import ChainChooser
    from edge_client.intervention import Intervention
    from edge_client.planning.codecs import LossTable

Cuts = tuple[int | str, ...]
"""A chain has one cut for each server, where its part begins; with one server several are a branch cut."""
FAILURES: Final = ("raise", "return")
"""What `EdgeClient.infer_many` can do with a failure."""


class EdgeClient(ClientCore):
    """A model's heads here, and a standing connection to its tails on a server.

        with EdgeClient("127.0.0.1:50051", "digits", split="stage2.0.conv1") as client:
            answer = client.infer(image)

    `server` is ``HOST:PORT``, or None if everything runs here. A list is a chain (docs/chains.md): the client connects
    to the first, and each hands on to the next one; `split` is then a list, too: where the part of each server begins
    (without one each request has to say it).
    With one server a list is a branch cut (docs/branches.md): these calls and what they need run here, all else there.
    `model` is a name or spec that `load_spec` takes, or a
    `ModelChoice`, which also takes an ``nn.Module`` and sets the device and the number of threads. `split` is the
    default cut: a layer's id or name, "input" (or "cloud-only"; the default) to send the inputs themselves: everything
    runs on the server; "cloud-only-file" to send input files as they are, which the server then reads, "edge-only":
    the whole model here, without a server, "auto": chosen for every request, by ``auto`` (`AutoOptions`), from
    measurements that `open` begins with, or "min": the set of calls that takes the least time, measured once (`least`).
    `codec` is how frontiers travel (`shared_hooks.codecs`), along a chain one, or a list of one for each crossing;
    "auto": each tensor as it is there the soonest, by measured codecs and link. With a loss only where `calibration` (a
    file or a table of `edge_client.calibrate`, of these very weights) shows that a cut loses no more than `max_loss`
    (0.005 or "0.5%"): docs/calibration.md.

    `metrics` asks for the layers' times on both sides. `deadline`: seconds for a whole request. `connection` has the
    limits (`ConnectionOptions`): how long to wait for a server, how many requests are between head and answer, and so
    how many frontiers are in memory; and the `Credentials` that prove who is who.

    `observers` are the names of those that look at every request, on both sides (`shared_hooks.observers.named`):
    `Answer.observations`. The server must allow them, else the request fails with ObserverRefused.

    `witness`, from 0 to 1, is the share of the split requests that are computed whole here, too, and compared with what
    came back (docs/witness.md): `Answer.witness`. A difference takes the cut out of use (`refused`): CutRefused.

    `fallback="edge"`: what the server does not answer (it is gone, serves something else, refuses us) is answered by
    the whole model here, and the answer says why (`Answer.fallback`). Once nothing was served for
    `connection.patience` (a second if the address refuses connections), later requests do not wait for it again; the
    server is called beside them until it is back.

    `exact=False` lets the server compute a request as one row of a batch with other clients' (docs/batching.md), where
    it has proven that rows do not influence each other: more answers a second, and last bits that may differ, as a
    batch's do. `Answer.batch_size` says how many there were; 1 is exact. What a witness compares is always exact.

    What `infer` takes and `Answer.result` is follows the model's spec, as in ``edge-client run`` (docs/python.md);
    ``preprocess``, ``postprocess``, ``labels``, ``call_kwargs`` switch one of its parts off.

    `lifecycle` has the hooks of this client's stages (docs/lifecycle.md); None = the default one, which logs.

    Any thread may call `infer`. The constructor loads the model; `open` (or ``with``) plans, hashes and connects, or
    else the first request does. `state` says how the connection is.
    """

    def __init__(
        self,
        server: str | Sequence[str] | None,
        model: str | ModelSpec | nn.Module | ModelChoice,
        split: Cut | Sequence[int | str] | None = None,
        *,
        codec: str | Sequence[str] = "raw",
        calibration: str | Path | LossTable | None = None,
        max_loss: str | float | None = None,
        metrics: bool = True,
        deadline: float = 60.0,
        observers: Iterable[str] = (),
        witness: float = 0.0,
        fallback: Literal["edge"] | None = None,
        exact: bool = True,
        lifecycle: Lifecycle | None = None,
        connection: ConnectionOptions | None = None,
        auto: AutoOptions | None = None,
        preprocess: bool = True,
        postprocess: bool = True,
        labels: bool = True,
        call_kwargs: bool = True,
    ) -> None:
        if fallback not in (None, "edge"):
            raise SpecError(f'fallback={fallback!r}: must be "edge" or None')
        choice = ModelChoice.of(model)
        if split in (AUTO, LEAST) and server is None:
            raise SpecError(f'split="{split}" chooses between here and a server: EdgeClient("HOST:PORT", ...)')
        if choice.only_head is not None and (witness or fallback or split in (EDGE_ONLY, AUTO, LEAST)):
            what = "witness" if witness else 'fallback="edge"' if fallback else f'split="{split}"'
            raise SpecError(f"only_head leaves the tail's weights in their files, and {what} runs the whole model here")
        own, *onward = (codec,) if isinstance(codec, str) else codec or ("raw",)
        super().__init__(
            server,
            choice,
            codec=own,
            calibration=calibration,
            max_loss=max_loss,
            metrics=metrics,
            deadline=deadline,
            observers=observers,
            witness=witness,
            fallback=fallback is not None,
            exact=exact,
            lifecycle=lifecycle,
            connection=connection,
            postprocess=self._postprocess if postprocess else None,
        )
        split = "input" if split is None and len(self.chain) < 2 else split
        self._split: Cut = () if split is None else self._checked(split)
        self._routes: dict[Cuts, Route] = {}
        if onward and len(onward) + 1 != len(self.chain):
            raise SpecError(
                f"codec={codec!r:.200}: a chain has one for each of its {len(self.chain)} crossings, or one"
            )
        self._onward = [codecs.check(one) for one in onward] or [self.codec] * (len(self.chain) - 1)
        """The codecs of the cuts after the first server."""
        self._reader = InputReader(self.wrapped.model, self.spec, preprocess=preprocess, call_kwargs=call_kwargs)
        example = self._edge_model.example
        self._swallowed = Swallowed(self.wrapped.model, example[1] if example is not None else ())
        self._labelled = self.spec if labels or self.spec is None else replace(self.spec, labels=())
        self._auto_options = auto
        self._auto: AutoClient | None = None
        self._chain_chooser: ChainChooser | None = None
        self.least: tuple[str | tuple[str, ...], str] | None = None
        """With ``split="min"``: the result, once measured, and the reason as text."""
        self._beginning = threading.Lock()
        self._interventions: tuple[Intervention, ...] = ()

    @property
    def split(self) -> Cut:
        """The cut of requests that name none, or the cuts of a chain; may be set at any time."""
        return self._split

    @split.setter
    def split(self, split: Cut | Sequence[int | str]) -> None:
        old, self._split = self._split, self._checked(split)
        split = self._split
        if split != old:
            self.lifecycle.emit(Stage.ON_SPLIT_CHANGE, old=old, new=split, reason="it was set")

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """The decisions of ``split="auto"`` with their reasons, the oldest first (`edge_client.adaptive.monitor`)."""
        if self._chain_chooser is not None:
            return list(self._chain_chooser.decisions)
        return [] if self._auto is None else self._auto.decisions.all

    @property
    def chooser(self) -> AutoClient | None:
        """The client that decides with ``split="auto"``; None without it, and until it has measured."""
        return self._auto

    def __repr__(self) -> str:
        split = f"split={self._split!r}"
        return summary_of(self, f"server={self.server}", f"model={self.model_id}", split, f"{self.state.name.lower()}")

    def open(self, seconds: float | None = None) -> Self:
        """Plan, hash, connect and wait for the server's Welcome, ``seconds`` (default: `patience`) at most.

        If the default cut is "edge-only" it plans and does not connect; if it is "auto" it measures, which takes
        seconds, or leaves that to the first request where the model has no example input. Without a `fallback` it
        raises ServerUnavailable, Disagreement (naming what differs), UnknownModel, NotAuthenticated (saying why).

        Where the model has an example input, a default cut at which that cannot be cut raises UnknownLayer (with near
        names) or CutRefused before anything is asked of the server.
        """
        if self.split == EDGE_ONLY:
            self._edge_model.plan_example()
        elif self.split == AUTO and len(self.chain) > 1:
            self.prepare()
            self._chained()
            self.connect(seconds)
        elif self.split == AUTO:
            self.prepare()
            if (example := self._edge_model.example) is not None:
                self._chooser(example)
        elif self.split == LEAST:
            self.prepare()
            if (example := self._edge_model.example) is not None:
                self._least(Call(*example))
            self.connect(seconds)
        else:
            self._connect()
            chained = isinstance(self.split, tuple) and len(self.chain) > 1
            if self.split != ():
                self._edge_model.check_cuts(self.split if chained else [self.split])  # type: ignore[arg-type]
            self.connect(seconds)
            if self._edge_model.chooser is not None:
                self._edge_model.chooser.begin()
        return self

    def _stop(self) -> None:
        if self._chain_chooser is not None:
            self._chain_chooser.close()
        if self._auto is not None:
            self._auto.close()

    def __enter__(self) -> Self:
        try:
            return self.open()
        except BaseException:
            self.close()
            raise

    def infer(
        self,
        *args: Any,
        split: Cut | Sequence[int | str] | None = None,
        deadline: float | None = None,
        exact: bool | None = None,
        **kwargs: Any,
    ) -> Answer:
        """Run the head here and the tail on the server, and return the model's output for ``(*args, **kwargs)``.

        An input by itself may be a tensor, a numpy array, a PIL image, a camera's frame (uint8, HWC, RGB), the path or
        the bytes of a file, a dictionary or `BatchEncoding` of keyword arguments, a tuple of positional ones, or a
        `Call`, which goes to the model as it is. Pictures and files are read as the spec says.

        Raises DeadlineExceeded, ServerUnavailable, UnknownLayer, CutRefused, InputMismatch, ModelFailed, ...
        (shared_hooks.errors). If the model's own arguments are called ``split``, ``deadline`` or ``exact``, give a
        `Call`.
        """
        return self.submit(*args, split=split, deadline=deadline, exact=exact, **kwargs).result()

    def submit(
        self,
        *args: Any,
        split: Cut | Sequence[int | str] | None = None,
        deadline: float | None = None,
        exact: bool | None = None,
        **kwargs: Any,
    ) -> Pending:
        """Start `infer`: run the head, and return while the rest is in progress."""
        stamps, (cut, route), until = Stamps(), self._cut(split), self.until(deadline)
        item = args[0] if len(args) == 1 and not kwargs else None
        if cut in (AUTO, CLOUD_FILE) and item is not None and self._reader.is_file(item):
            return self._submit(Path(item) if isinstance(item, str) else item, cut, route, stamps, until, exact=exact)
        if cut == CLOUD_FILE:
            work_of(item if item is not None else args, cut)  # which checks the type
        call = self._reader.call(args, kwargs)
        if not isinstance(item, torch.Tensor):
            stamps.prepared = now_ns()
        return self._submit(call, cut, route, stamps, until, exact=exact)

    def _submit(
        self,
        item: Any,
        cut: Cut,
        route: Route,
        stamps: Stamps,
        until: float,
        position: Position | None = None,
        exact: bool | None = None,
    ) -> Pending:
        """``item``: a `Call`; or an input file, if it may be sent as it is."""
        if isinstance(item, Call) and item.kwargs:
            self._swallowed.look(item)
        if cut == LEAST:
            cut = self._least(item)
        if cut == AUTO:
            for one in self._interventions:
                one.check(cut)
            chooser = self._chooser(item)
            return Pending(chooser.begin(item, until, position, stamps, exact), chooser.finish, chooser.leave)
        work = work_of(item, cut) or item
        running = self.requests.begin(work, cut, stamps, until, position, exact, route=route)
        for one in self._interventions:
            try:
                one.check(cut)
            except IsthmusError as error:
                self.requests.cancel(running, str(error))
                raise
        return Pending(running, self.requests.finish, self.requests.cancel)

    def _chooser(self, item: Any) -> AutoClient:
        """Return the client that decides where requests run; it is measured first on the example, or else on
        ``item``.
        """
        with self._beginning:
            if self._auto is None:
                self._refuse_closed()
                from edge_client.adaptive import AutoOptions
                from edge_client.adaptive.beginning import begin

                self.prepare()
                example = self._edge_model.example
                call = Call(*example) if example is not None else self._reader.read(item)
                file = item.path if isinstance(item, InputItem) else item if isinstance(item, Path) else None
                made = begin(self, self._auto_options or AutoOptions(), call, prepare=self._inputs_of, file=file)
                self._auto = made
                try:
                    self._refuse_closed()  # while it measured, when `close` found nothing to end
                except Cancelled:
                    made.close()
                    raise
            return self._auto

    def _chained(self) -> ChainChooser:
        """Return the chooser of a chain's cuts, measured first. Raises SpecError without an example input."""
        with self._beginning:
            if self._chain_chooser is None:
                self._refuse_closed()
                from edge_client.adaptive import AutoOptions
                from edge_client.adaptive.chain import ChainChooser

                self.prepare()
                if (example := self._edge_model.example) is None:
                    raise SpecError('split="auto" along a chain is measured on an example, and the model has none')
                self._chain_chooser = ChainChooser(self, self._auto_options or AutoOptions(), Call(*example))
            return self._chain_chooser

    def _least(self, call: Call) -> Cut:
        """Return the cut of ``split="min"``, measured first on the example, or else on ``call``."""
        with self._beginning:
            if self.least is None:
                self._refuse_closed()
                from edge_client.adaptive import AutoOptions
                from edge_client.adaptive.beginning import least

                self.least = least(self, self._auto_options or AutoOptions(), call)
                self.lifecycle.emit(Stage.ON_SPLIT_CHANGE, old=LEAST, new=self.least[0], reason=self.least[1])
            return self.least[0]

    def _inputs_of(self, item: Any) -> Inputs:
        call = self._reader.read(item)
        return call.args, call.kwargs

    def _postprocess(self, output: Any) -> Any:
        """`Answer.result`: predictions, or the output if the spec defines nothing and there are none."""
        if self._labelled is None:
            return output
        found: list[Prediction] = self._labelled.postprocess(output)
        return found or output

    @overload
    def infer_many(
        self,
        inputs: Iterable[Any],
        *,
        split: Cut | Sequence[int | str] | None = None,
        deadline: float | None = None,
        exact: bool | None = None,
        prepare: Callable[[Any], Inputs] | None = None,
        failures: Literal["raise"] = "raise",
    ) -> Iterator[Answer]: ...
    @overload
    def infer_many(
        self,
        inputs: Iterable[Any],
        *,
        split: Cut | Sequence[int | str] | None = None,
        deadline: float | None = None,
        exact: bool | None = None,
        prepare: Callable[[Any], Inputs] | None = None,
        failures: Literal["return"],
    ) -> Iterator[Answer | Failure]: ...
    def infer_many(
        self,
        inputs: Iterable[Any],
        *,
        split: Cut | Sequence[int | str] | None = None,
        deadline: float | None = None,
        exact: bool | None = None,
        prepare: Callable[[Any], Inputs] | None = None,
        failures: Literal["raise", "return"] = "raise",
    ) -> Iterator[Answer | Failure]:
        """Answers in the order of ``inputs``, with several requests under way: as many as keep the way to the server
        busy, within `ConnectionOptions.max_in_flight` and ``max_in_flight_bytes``.

        An input is what `infer` takes; a tuple always is the positional arguments, a dictionary the keyword arguments.
        With ``prepare`` it may be anything, and ``prepare(input)`` gives ``(args, kwargs)`` (its time and errors belong
        to that input). With "cloud-only-file" it is an `InputItem` or a path, and the server prepares it. Heads run
        in the caller's thread, between two answers. A live source (`edge_client.sources`) is asked for a frame when
        there is a place for it, and answers do not wait for its next one. In place of ``inputs``, a text or path names
        a file, a folder, a pattern, a video or a camera.

        ``failures="raise"`` ends the iteration with the first failure, at its place in the order; "return" yields a
        `Failure` there and continues. Errors of the connection (`CONNECTION_ERRORS`) always end it. Leaving the
        iteration early cancels what is under way. Do not change an input before its answer has come: the frontier is
        sent from the input's memory (the checksum detects a change, and the request fails).
        """
        return self.iterate(inputs, split=split, deadline=deadline, exact=exact, prepare=prepare, failures=failures)

    def iterate(
        self,
        inputs: Any,
        *,
        split: Cut | Sequence[int | str] | None = None,
        deadline: float | None = None,
        exact: bool | None = None,
        prepare: Callable[[Any], Inputs] | None = None,
        failures: Literal["raise", "return"] = "raise",
        begun: Callable[[Pending], None] = lambda pending: None,
    ) -> Iterator[Answer | Failure]:
        """As `infer_many`; ``begun`` is called with every request in progress, so that it can be cancelled."""
        if failures not in FAILURES:
            raise SpecError(f'failures={failures!r:.60}: must be "raise" or "return".{near(str(failures), FAILURES)}')
        cut, route = self._cut(split)
        moves = len(self.chain) > 1 and AUTO in (split, self._split if split is None else None)
        self.until(deadline)  # an invalid deadline is the caller's mistake, not a failed request

        named = isinstance(inputs, (str, Path))
        source = several(inputs)

        def start(item: Any, position: Position) -> Pending:
            stamps, until = Stamps(), self.until(deadline)
            if cut == CLOUD_FILE or (cut == AUTO and prepare is None and self._reader.is_file(item)):
                item = Path(item) if isinstance(item, str) else item
            else:
                item = Call(*prepare(item)) if prepare is not None else self._reader.read(item)
                stamps.prepared = now_ns()
            where = self._cut(split) if moves else (cut, route)
            pending = self._submit(item, *where, stamps, until, position, exact)
            begun(pending)
            return pending

        answers = in_order(
            source,
            self.connection.max_concurrent,
            self.connection.max_pipelined if cut != AUTO else None,
            start=start,
            finish=Pending.result,
            cancel=lambda pending: pending.cancel("the iteration was left"),
            fatal=CONNECTION_ERRORS if cut != AUTO else (),
            raise_failures=failures == "raise",
            lifecycle=self.lifecycle,
        )
        return closing_with(source, answers) if named else answers

    @contextmanager
    def intervene(self, changes: Mapping[str, Callable[[Any], Any]]) -> Iterator[None]:
        """Change activations on purpose, in modules that run here, for as long as the block lasts.

            with client.intervene({"layer3": lambda output: output * 0}):
                answer = client.infer(image)

        The name of a block or layer -> a function of the output of each of its calls: what it returns, of the same
        shape and dtype, is used instead; None leaves it. Answers name the modules (`Answer.transforms`).

        Raises UnknownLayer. A request raises CutRefused where a module runs behind its cut, and ModelFailed where a
        function raises or returns another shape.
        """
        from edge_client.intervention import Intervention

        made = Intervention(self.wrapped, changes)
        with made.attach(self.wrapped):
            self._interventions += (made,)
            try:
                yield
            finally:
                self._interventions = tuple(one for one in self._interventions if one is not made)

    @contextmanager
    def generating(
        self,
        model: nn.Module | None = None,
        *,
        cut: str | Sequence[str],
        answer: tuple[Any, ...] | None = None,
        codec: str | None = None,
    ) -> Iterator[Any]:
        """The client's model (or ``model``, of the same weights), whose ``generate()`` is split after ``cut``; along a
        chain after each of a list.

            with client.generating(cut="model.layers.3") as model:
                ids = model.generate(**inputs, max_new_tokens=64)

        Any call of the model in this block is a step of a generation: its first layers run here, the others on the
        server, and each side keeps its part of the state. docs/generation.md; errors: `generation.SplitGenerator`.
        """
        from edge_client.generation import split_model  # imported here: few clients generate

        with split_model(model, self, cut, answer=answer, codec=codec) as split:
            yield split

    def _cut(self, split: Cut | Sequence[int | str] | None) -> tuple[Cut, Route]:
        """Return the edge's cut, and the parts after the first server's."""
        cuts = self._split if split is None else self._checked(split)
        if cuts == AUTO and len(self.chain) > 1:
            cuts = self._chained().cuts
        if cuts == ():
            raise SpecError("a chain of servers has no cut of its own: give split=[...], one for each server")
        if not isinstance(cuts, tuple) or len(self.chain) < 2:
            return cuts, ()
        if (route := self._routes.get(cuts)) is None:
            for one in self._onward:
                if isinstance(own := codecs.CODECS.get(one), LearnedCodec):
                    own.check_model(self.wrapped.weights_hash())
            hops = zip(self.chain[1:], map(self._edge_model.name_of, cuts[1:]), self._onward, strict=True)
            route = self._routes[cuts] = tuple(
                Hop(server=name, cut=cut, codec=_at(cut, own)) for name, cut, own in hops
            )
        return cuts[0], route

    def _checked(self, split: Cut | Sequence[int | str]) -> Cut:
        """Return one cut, or a chain's. Raises SpecError."""
        if isinstance(split, str) and len(self.chain) < 2:
            split = members(split) or split
        several = isinstance(split, (list, tuple))
        cuts = tuple(split) if isinstance(split, (list, tuple)) else (split,)
        if not cuts or not all(isinstance(cut, (str, int)) for cut in cuts):
            raise SpecError(f"split={split!r:.200}: expected a layer's name or id, or a list of such for a chain")
        words = (AUTO, LEAST, EDGE_ONLY, CLOUD_FILE)
        first: Cut = cuts[0]
        alone = len(self.chain) < 2 or first in (EDGE_ONLY, AUTO)
        if len(cuts) == 1 and (not several or first in (EDGE_ONLY, AUTO)) and alone:
            return first
        if len(self.chain) < 2:
            if found := [cut for cut in cuts if cut in words]:
                raise SpecError(f'split={split!r:.200}: "{found[0]}" is no layer or block of a set')
            return cuts
        if len(cuts) != len(self.chain):
            begins = f"{len(self.chain)} server{'s' if len(self.chain) > 1 else ''}"
            reported = f"{len(cuts)} cuts" if several else "one cut"
            raise SpecError(
                f"split={split!r:.200}: {reported} for {begins}: a chain has one for each, where its part begins"
            )
        if found := [cut for cut in cuts if cut in words or members(cut)]:
            raise SpecError(f'split={split!r:.200}: "{found[0]}" is no cut of a chain')
        return cuts


def _at(cut: str, codec: str) -> str:
    """Return the codec's name if it may be used at a cut between servers, else ``""``: codecs with a basis or frames,
    and a learned one made for another cut, are for the first cut only.
    """
    own = codecs.CODECS.get(codec)
    if own is None or isinstance(own, (Basis, Frames)) or (isinstance(own, LearnedCodec) and own.file.cut != cut):
        return ""
    return own.name
