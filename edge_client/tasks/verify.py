"""Verify every cut through the real link: compare its answer with the whole model's on both sides."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from edge_client.client import EdgeClient
from edge_client.credentials import Credentials
from edge_client.options import VerifyOptions
from edge_client.process import local_server
from edge_client.screen import Row, Tabular, printable, table
from edge_client.screen import progress as bar
from edge_client.settings import OWN, chain_of
from edge_client.tasks.subject import NO_EXAMPLE, Model, Subject, address_of, subject_of
from edge_client.transport import ConnectionOptions
from edge_client.user_text import EDGE_ONLY, option
from edge_client.witness import WitnessComparison, compare, tolerance_between
from shared_hooks.errors import AccessRefused, CutRefused, IsthmusError, ModelFailed, SpecError
from shared_hooks.modules import holder_modules
from shared_hooks.options import takes
from shared_hooks.planning import LayerInfo, Plan
from shared_hooks.showing import short
from shared_hooks.tensors import classes_of, flatten
from shared_hooks.verification import Report

WHOLE_THERE = "input"
"""The cut before the first layer: the server computes everything."""


@short
@dataclass(frozen=True)
class CutVerdict:
    """The result of one cut, or of the cuts of a chain, of which ``layer_id`` is the first.

    ``here`` and ``there``: the comparison with the whole model on this side and on the server; None if there was no
    answer, with the ``reason``. ``refused``: the cut was refused, as it should be.
    """

    layer_id: int
    name: str
    here: WitnessComparison | None
    there: WitnessComparison | None
    refused: bool = False
    reason: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether the answer is bit for bit that of one side's whole model."""
        return any(one is not None and one.bits for one in (self.here, self.there))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"exact": self.is_exact}


@short
@dataclass(frozen=True)
class Verified:
    """Results of all cuts.

    ``sides``: the server's whole model compared with the one here, None if the cut ``input`` is refused; ``unlike``:
    why the two machines may differ in the last bits, empty if they are alike.
    """

    cuts: tuple[CutVerdict, ...]
    sides: WitnessComparison | None
    unlike: tuple[str, ...]
    limit: float
    """Largest difference allowed between these two machines; 0 if they are alike."""
    notes: tuple[str, ...] = ()
    """Differences between the models that do not affect results."""
    servers: int = 1
    """Number of servers: more than one are a chain."""

    @property
    def answered(self) -> list[CutVerdict]:
        return [one for one in self.cuts if one.here is not None]

    @property
    def wrong(self) -> list[CutVerdict]:
        """Cuts that failed, and answers too far from both sides."""
        return [one for one in self.cuts if not one.refused and not self._passes(one)]

    @property
    def ok(self) -> bool:
        """Whether the two sides, and every cut between them, agree within what their machines allow."""
        return (self.sides is None or self.sides.within(self.limit)) and not self.wrong

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "sides": None if self.sides is None else asdict(self.sides),
            "unlike": list(self.unlike),
            "limit": self.limit,
            "largest": self.largest,
            "notes": list(self.notes),
            "top1": self.top1,
            "cuts": [one.as_dict() for one in self.cuts],
        }

    def _passes(self, one: CutVerdict) -> bool:
        return one.is_exact or any(each is not None and each.within(self.limit) for each in (one.here, one.there))

    @property
    def largest(self) -> float:
        """The largest difference from the whole model here, in units of the output's scale."""
        return max((one.here.largest for one in self.answered if one.here is not None), default=0.0)

    @property
    def top1(self) -> float | None:
        """The lowest share of rows with the same largest value; None for outputs without such rows."""
        shares = [one.here.top1 for one in self.answered if one.here is not None and one.here.top1 is not None]
        return min(shares, default=None)


def verified(
    client: EdgeClient,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    on_cut: Callable[[int, int], None] = lambda done, total: None,
    depth: int | None = None,
    named: Sequence[str] | None = None,
) -> Verified:
    """Make one request for each cut: of layers ``depth`` levels deep, or those ``named``; `chains_of` them along a
    chain.

    Raises what the first request raises; later failures are results.
    """
    client.open()
    model = client.wrapped.model
    find = classes_of(holder_modules(model))
    here = client.infer(*args, **kwargs, split=EDGE_ONLY).output
    there, has_there, servers = None, False, len(client.chain)
    if servers == 1:
        with suppress(CutRefused, AccessRefused):
            there, has_there = client.infer(*args, **kwargs, split=WHOLE_THERE).output, True
    about = client.server_about
    apart = client.unlike
    formats = {tensor.dtype for tensor in (*model.parameters(), *flatten(here)[1])}
    limit = tolerance_between(formats, about, client.device) if apart else 0.0
    plan = client.wrapped.plan(*args, **kwargs)
    shown = plan.within(depth) if named is None else _named(plan, named)
    layers = [(-1, WHOLE_THERE), *((one.layer_id, one.name) for one in shown if one.can_split or servers == 1)]
    splits = chains_of(layers, servers)
    if not splits:
        raise SpecError(f"{len(layers)} cuts are too few for a chain of {servers} servers")

    found: list[CutVerdict] = []
    for number, (layer_id, cuts) in enumerate(splits):
        name = ",".join(cuts)
        try:
            answer = client.infer(*args, **kwargs, split=cuts if servers > 1 else name)
            from_there = compare(there, answer.output, find) if has_there else None
            found.append(CutVerdict(layer_id, name, compare(here, answer.output, find), from_there))
        except (CutRefused, AccessRefused) as error:
            if servers > 1 and number + 1 == len(splits) and all(one.here is None for one in found):
                raise  # a chain on which nothing is answered is not verified
            found.append(CutVerdict(layer_id, name, None, None, True, str(error)))
        except IsthmusError as error:
            found.append(CutVerdict(layer_id, name, None, None, False, f"{type(error).__name__}: {error}"))
        on_cut(number + 1, len(splits))
    sides = compare(here, there, find) if has_there else None
    return Verified(tuple(found), sides, apart, limit, client.notes, servers)


def _named(plan: Plan, names: Sequence[str]) -> list[LayerInfo]:
    """Return the layers by name. Raises UnknownLayer."""
    return [info for name in names if (info := plan.resolve(name)) is not None]


def chains_of(layers: Sequence[tuple[int, str]], servers: int) -> list[tuple[int, tuple[str, ...]]]:
    """Return the cuts to verify for a chain of so many servers, with the id of the first.

    For one server each layer; for more each layer once as the first and once as the last cut, the others spread evenly
    after or before it.
    """
    if servers == 1:
        return [(layer_id, (name,)) for layer_id, name in layers]
    end, found = len(layers) - 1, {}
    for at in range(len(layers)):
        for first, last in ((at, end), (0, at)):
            if last - first >= servers - 1:
                places = [first + number * (last - first) // (servers - 1) for number in range(servers)]
                found[tuple(layers[place][1] for place in places)] = layers[first][0]
    return [(layer_id, cuts) for cuts, layer_id in found.items()]


# `verify`: every cut of a model against the whole model, in this process or through a server.


Verdict = Literal["exact", "refused", "as near as the machines allow", "differs", "failed"]


@dataclass(frozen=True, slots=True)
class CheckedCut:
    """One cut. ``layer_id`` -1 is the cut before the first layer; ``reason``: why it is refused, differs or failed."""

    layer_id: int
    name: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True, repr=False)
class Checked(Tabular):
    """Result of `edge_client.verify`. A row is a cut.

    ``ok``: no answer differs from the whole model's (through a server: by more than the machines allow). ``found``: the
    details, a `Report` of this process, or `Verified` through a server. ``problems``: what would fail every request at
    any cut, such as an output that cannot be sent.
    """

    model: str
    server: str | None
    cuts: Sequence[CheckedCut]
    found: Report | Verified
    plan_digest: str | None = None
    problems: tuple[str, ...] = ()

    shown = {"layer_id": "id", "name": "cut after", "verdict": "verdict", "reason": "reason"}  # noqa: RUF012

    @property
    def ok(self) -> bool:
        return self.found.ok and not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def title(self) -> str:
        counts = {verdict: sum(one.verdict == verdict for one in self.cuts) for verdict in Verdict.__args__}  # type: ignore[attr-defined]
        parts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        where = f" through {self.server}" if self.server else ""
        return f"{self.model}{where}: of {len(self.cuts)} cuts {parts}: {'ok' if self.ok else 'NOT OK'}"

    def rows(self) -> list[Row]:
        return [
            {"layer_id": one.layer_id, "name": one.name, "verdict": one.verdict, "reason": one.reason or None}
            for one in self.cuts
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        known = {"model": self.model, "server": self.server, "plan_digest": self.plan_digest}
        return {**known, **self.found.as_dict(), "ok": self.ok, "problems": list(self.problems)}

    def text(self) -> str:
        bad = [one for one in self.cuts if one.verdict not in ("exact", "as near as the machines allow")]
        rows = [[str(one.layer_id), printable(one.name), one.verdict, printable(one.reason)] for one in bad]
        shown = table(["id", "name", "cut", "reason"], rows, right=(0,)) + "\n\n" if rows else ""
        problems = "".join(f"no request can be answered: {printable(one)}\n" for one in self.problems)
        return shown + problems + printable(self.title())


@takes(VerifyOptions)
def verify(server: str | Sequence[str] | None, model: Model, inputs: Any = None, *, options: VerifyOptions) -> Checked:
    """Cut ``model`` everywhere, and compare every answer with the whole model's, bit for bit.

        assert edge_client.verify("none", module, image).ok      # in this process, through bytes
        edge_client.verify("cloud:50051", "digits").to_pandas()  # over the real link

    ``server``: HOST:PORT, "own" (started on this machine), "none" (in this process; the command uses one process for
    whole models and one for tails that never ran), None: the default (ISTHMUS_SERVER, settings), else in this process.
    A list is a chain (docs/chains.md): each layer is its first cut once, and its last once. ``model`` and ``inputs``:
    as for `plan`; only the first input is used. ``cuts``: these only, "a,b" or a list, one of which may be "c + d"
    along branches; None: all.

    Raises SpecError, UnknownModel, InputMismatch, UnknownLayer, and through a server what the first request raises.
    """
    if server is not None and not isinstance(server, str):
        chain = chain_of(server)
        if options.cuts is not None:
            raise SpecError(f"{option('cuts')}: along a chain all cuts are tried")
        subject = subject_of(model, inputs, chain[0], options.credentials)
        return _through(chain, subject, options.credentials, options.progress, None)
    address = address_of(server)
    subject = subject_of(model, inputs, address, options.credentials)
    names = options.cuts.split(",") if isinstance(options.cuts, str) else options.cuts
    names = None if names is None else [name.strip() for name in names]
    if address is None:
        return _here(subject, options.progress, names)
    if address == OWN:
        with local_server(subject.choice) as own:
            return _through((own,), subject, None, options.progress, names)
    return _through((address,), subject, options.credentials, options.progress, names)


def _may_start_processes() -> bool:
    """Return whether importing the main module is safe: a command's runs nothing, a script may lack a guard."""
    main = sys.modules.get("__main__")
    module = getattr(getattr(main, "__spec__", None), "name", "")
    return module.endswith("__main__") or Path(getattr(main, "__file__", None) or "").stem == "edge-client"


def _copy(module: nn.Module, device: torch.device) -> nn.Module:
    return deepcopy(module).to(device)


def _here(subject: Subject, show: bool, names: Sequence[str] | None) -> Checked:
    module = getattr(subject.spec, "module", None)
    kept = None if module is None else deepcopy(module)  # in its state before it runs
    loaded = subject.load(on_inputs=True, shallow=True)
    count = len(loaded.wrapped.cuts if names is None else names) + 1
    with loaded.wrapped as wrapped, bar("cuts", count, show) as advance:
        only = None if names is None else [info.name for info in _named(loaded.plan, names)]
        cold = partial(loaded.spec.load_model, wrapped.device) if kept is None else partial(_copy, kept, wrapped.device)
        check = partial(wrapped.verify, *loaded.args, on_cut=lambda *_: advance(""), cold=cold, only=only)
        check = partial(check, **loaded.kwargs)
        try:
            report = check(processes=_may_start_processes())
        except ModelFailed:  # nothing that another process can make
            report = check()
        problems = [f"the output cannot be sent: {report.unsendable}"] if report.unsendable else []
        try:
            loaded.spec.postprocess(wrapped.whole(*loaded.args, **loaded.kwargs))
        except IsthmusError as error:
            problems.append(f"the output does not fit the spec: {error}")
    first = CheckedCut(-1, "input", "exact" if report.input_exact else "differs", "")
    found = [first]
    parts: list[tuple[Sequence[LayerInfo], Verdict]] = [
        (report.exact, "exact"),
        (report.refused, "refused"),
        (report.differing, "differs"),
    ]
    for layers, verdict in parts:
        found += [CheckedCut(one.layer_id, one.name, verdict, one.reason or "") for one in layers]
    cuts = sorted(found, key=lambda one: one.layer_id)
    return Checked(loaded.spec.model_id, None, cuts, report, loaded.plan_digest, tuple(problems))


def _through(
    servers: tuple[str, ...],
    subject: Subject,
    credentials: Credentials | None,
    show: bool,
    names: Sequence[str] | None,
) -> Checked:
    call = None if subject.inputs else subject.spec.example()
    if call is None and not subject.inputs:
        subject.check_factory()
        raise SpecError(f"{subject.spec.origin}: {NO_EXAMPLE}")
    args, kwargs = call if call is not None else subject.inputs[0].read(subject.spec)
    connection = ConnectionOptions(credentials=credentials or Credentials())
    split = EDGE_ONLY if len(servers) > 1 else WHOLE_THERE  # for requests that name none: there are none
    client = EdgeClient(servers, subject.choice, split, connection=connection)
    with client, bar("cuts", None, show) as advance:

        def on_cut(done: int, total: int) -> None:
            advance("", done=done, total=total)

        found = verified(client, args, kwargs, on_cut, subject.choice.depth, names)
    cuts = [CheckedCut(one.layer_id, one.name, _verdict(one, found), one.reason) for one in found.cuts]
    return Checked(subject.spec.model_id, ",".join(servers), cuts, found)


def _verdict(one: CutVerdict, found: Verified) -> Verdict:
    if one.refused:
        return "refused"
    if one.here is None:
        return "failed"
    if one.is_exact:
        return "exact"
    return "differs" if one in found.wrong else "as near as the machines allow"
