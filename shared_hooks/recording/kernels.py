"""What the kernels of a recorded run read, overwrite and write: the level below torch functions."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch

from shared_hooks import devices
from shared_hooks.forward import (
    FORM_ONLY,
    OVERWRITES,
    CallKind,
    Foresight,
    arguments_of,
    by_truth,
    is_foreign,
    shape_from_data,
)
from shared_hooks.recording.ledger import Ledger, bits_of, live_at_start
from shared_hooks.recording.trace import DataEvent, Op, Span, Storage
from shared_hooks.tensors import UnknownHolder, flatten

_NONE: Set[int] = frozenset()
# indexing with more rows counts as reading everything
MAX_ROWS = 512
INDEXES = ("aten::index_select", "aten::index")


class KernelLog(Ledger):
    """A ledger that also keeps the data events, and what follows from them: what depends on the inputs."""

    def __init__(self, existing: list[torch.Tensor]) -> None:
        super().__init__(existing)
        self.in_opaque = 0
        self.events: list[DataEvent] = []
        self.dynamic: list[int] = []
        self.draws: list[int] = []
        self.foresight = Foresight()
        self.dice: dict[str, list[tuple[int, int]]] = {}
        self.generators: list[torch.Generator] = []
        self.doubtful = False
        self.regular = True
        """Whether all kernels since this was set behave the same for any values."""
        self.undeclared: set[Storage] = set()
        self.scratch: set[Storage] = set()
        """The model's own storages that are rewritten before they are read; known at the end."""

    def addresses(self, storages: set[Storage]) -> set[int]:
        """Identifies storages of the model's own, as long as it keeps them."""
        return {address for address, storage in self.storages.items() if storage in storages}

    def not_written(self, addresses: set[int]) -> list[str]:
        """Return the names of those storages of the model's own that this run has not written to."""
        written = {storage for event in self.events for storage in event.writes}
        storages = [self.storages.get(address) for address in addresses]
        lost = {"memory that it no longer has" for storage in storages if storage is None}
        return sorted(lost | {self.named(storage) for storage in storages if storage and storage not in written})

    def named(self, storage: Storage) -> str:
        """Return the place where the model keeps a storage."""
        return storage.name

    def reads_first(self, addresses: set[int]) -> bool:
        """Return whether this run reads any of these storages before it overwrites them."""
        storages = [self.storages[address] for address in addresses if address in self.storages]
        return any(live_at_start(storage, self.events) for storage in storages)

    def kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one operation of the dispatcher: which storages it reads and writes."""
        seq = self.tick()
        facts = facts_of(func)
        inputs = arguments_of(args, kwargs)
        handed = [self.storage_of(tensor) for tensor in inputs]
        spans = [(storage, self.view(tensor, storage)) for tensor, storage in zip(inputs, handed, strict=True)]
        before = _random_state(func, kwargs, inputs) if facts.may_draw else None
        bits = [bits_of(tensor) for tensor in inputs] if facts.foreign else None
        result = func(*args, **kwargs) if kwargs else func(*args)
        outputs = [result] if type(result) is torch.Tensor else arguments_of((result,), {})
        chosen = self._takes_chosen(inputs)
        is_remote = chosen
        for storage in handed:
            if storage.tainted <= seq:
                is_remote = True
        foreseen = self.foresight.question(func, args, kwargs, outputs) if is_remote else None
        written, unread = written_and_unread(facts, args, kwargs) if facts.written else (_NONE, _NONE)
        if bits is not None:
            written = self._undeclared(inputs, handed, bits, written)
        made = [self.storage_of(tensor, seq) for tensor in outputs]
        reads: list[Span] = []
        if not facts.form_only and (written or not _all_in(made, handed)):  # otherwise views, which read nothing
            reads = self._reads(facts, args, inputs, spans, unread) if unread or facts.indexes else spans
        draws = before is not None and not torch.equal(before, _random_state(func, kwargs, result))
        reads_tainted = is_remote if reads is spans else any(storage.tainted <= seq for storage, _ in reads)
        reads_tainted |= chosen and bool(reads)
        writes: list[Storage] = []
        overwrites: list[Span] = []
        if written:
            writes = [storage for tensor, storage in zip(inputs, handed, strict=True) if id(tensor) in written]
            if unread:
                overwrites = [
                    span
                    for tensor, span in zip(inputs, spans, strict=True)
                    if id(tensor) in unread and self.is_exact(tensor, span[0])
                ]
        # where data choose what is written to, the written values depend on them, too
        placed = chosen or (self.op is not None and self.op.dynamic and self.op.reads_tainted)
        if writes and placed:
            reads_tainted = True
        if reads_tainted or draws:
            for storage in writes:
                storage.tainted = min(storage.tainted, seq)
                storage.born_tainted |= storage.created == seq
            for storage in made:
                if storage.created == seq:
                    storage.tainted = min(storage.tainted, seq)
                    storage.born_tainted = True
        self.events.append(DataEvent(seq, reads, overwrites, writes, handed))
        self.regular &= facts.regular
        op = self.op or self._unseen(func, inputs, result)
        if op is not None:
            op.reads_tainted |= reads_tainted
            if foreseen is not None:
                op.unasked.append(foreseen)
            op.draws |= draws
            op.writes += writes
        if draws:
            self.draws.append(seq)
            self._note_draw(kwargs.get("generator"), [*inputs, *outputs])
        if reads_tainted and (facts.shape_from_data or facts.foreign):
            shaped = facts.shape_from_data and (not facts.indexes or by_truth(args))
            if shaped or (facts.foreign and foreseen is not None and not foreseen()):
                self.note_dynamic(op)
        if writes:
            for tensor, storage in zip(inputs, handed, strict=True):
                if id(tensor) in written:
                    self._note_memory(tensor, storage, reads_tainted)
            if facts.writes_no_data:
                writes.clear()
        return result

    def _undeclared(
        self, inputs: list[torch.Tensor], handed: list[Storage], bits: list[str], declared: Set[int]
    ) -> Set[int]:
        """Return what was written, by identity: another library's operation may write to more than it declares."""
        written = declared
        for tensor, storage, was in zip(inputs, handed, bits, strict=True):
            self.doubtful |= storage.outside
            if id(tensor) not in written and bits_of(tensor) != was:
                written = {*written, id(tensor)}
                self.undeclared |= {storage} if storage.outside else set()
        return written

    def _reads(
        self, facts: KernelFacts, args: tuple[Any, ...], inputs: list[torch.Tensor], spans: list[Span], unread: Set[int]
    ) -> list[Span]:
        """Return what a kernel reads of its arguments, if that is less than all."""
        rows = self._rows(facts.func, args) if facts.indexes else None
        if rows is not None:
            return [*rows, *(span for tensor, span in zip(inputs, spans, strict=True) if tensor is not args[0])]
        return [span for tensor, span in zip(inputs, spans, strict=True) if id(tensor) not in unread]

    def _takes_chosen(self, inputs: list[torch.Tensor]) -> bool:
        """Return whether an argument is a view chosen by data: what is computed from it depends on the inputs."""
        if self.op is not None:
            return self.op.takes_chosen
        known = (self.value_by_id.get(id(tensor)) for tensor in inputs)
        return any(entry is not None and entry[1].chosen for entry in known)

    def note_chosen(self, op: Op) -> None:
        """Mark results that are views chosen by data of what depends on no input, such as a row of a table."""
        if op.takes_chosen or (op.dynamic and op.reads_tainted):
            for value in op.results:
                value.chosen |= value not in op.args and not value.hangs(self.seq)

    def _rows(self, func: Any, args: tuple[Any, ...]) -> list[Span] | None:
        """Return what an indexing with a constant index reads of its first argument; None if unknown."""
        name = func._schema.name
        if self.dynamic:
            return None  # an index that Python made after reading data may depend on the data
        source = args[0]
        chosen = [(args[1], args[2])] if name == "aten::index_select" else list(enumerate(args[1]))
        chosen = [(dim, index) for dim, index in chosen if index is not None]
        if len(chosen) != 1 or source.dim() == 0 or self.storage_of(source).opaque:
            return None
        dim, index = chosen[0]
        storage = self.storage_of(index)
        if index.dtype not in (torch.int64, torch.int32) or storage.opaque or storage.tainted <= self.seq:
            return None
        numbers = (index.reshape(-1) % source.shape[dim]).unique().tolist()
        starts = [number for number in numbers if number - 1 not in set(numbers)] if len(numbers) <= MAX_ROWS else []
        stops = [number + 1 for number in numbers if number + 1 not in set(numbers)] if starts else []
        runs = [source.narrow(dim, start, stop - start) for start, stop in zip(starts, stops, strict=True)]
        return [self.span(run) for run in runs] or None

    def _note_draw(self, generator: torch.Generator | None, tensors: list[torch.Tensor]) -> None:
        if generator is None:
            name = str(tensors[0].device)
        else:
            name = "given"
            if any(generator is kept for kept in self.generators):
                self.refuse("the model draws from a generator that it keeps from one forward to the next")
        self.dice.setdefault(name, []).append((self.seq - 1, self.seq))

    def note_dynamic(self, op: Op | None) -> None:
        """Record that what the model does from here on may depend on data."""
        self.dynamic.append(self.seq)
        if op is not None:
            op.dynamic = True

    def _note_memory(self, tensor: torch.Tensor, storage: Storage, tainted: bool) -> None:
        """A tensor that is written in place may get other memory (``set_``), or more of it (``resize_``, ``out=``)."""
        if storage.opaque:
            return
        now = self.storage_of(tensor, self.seq)
        if now is not storage:
            self.moved(tensor, storage, tainted or now.tainted <= self.seq)
        elif tensor.untyped_storage().nbytes() > storage.nbytes:
            if storage.tainted < self.seq or storage.outside:
                self.refuse("a tensor's memory is made larger in place", max(storage.created, 0))
            elif tainted:
                self.refuse("a tensor's memory is made larger in place, before it", self.seq)
            storage.nbytes = tensor.untyped_storage().nbytes()
            storage.elements = max(storage.elements, storage.nbytes // storage.itemsize - storage.base)

    def moved(self, tensor: torch.Tensor, before: Storage, tainted: bool) -> None:
        """A tensor object has been given other memory; ``tainted``: by or with what depends on the inputs."""
        self.value_by_id.pop(id(tensor), None)
        if before.outside:
            self.refuse("the model gives one of its parameters, buffers or constants other memory")
        elif tainted:
            self.refuse("a tensor is given other memory in place, before it", self.seq)

    def _unseen(self, func: Any, inputs: list[torch.Tensor], result: Any) -> Op | None:
        """Return an operation that belongs to no torch function call of the model's Python."""
        if self.in_opaque:
            return None
        op = Op(self.seq, str(func), [self.value_of(tensor) for tensor in inputs], hidden=True, end=self.seq)
        op.args_tainted = any(value.hangs(op.seq) for value in op.args)
        op.takes_chosen = any(value.chosen for value in op.args)
        known = {id(tensor): value for tensor, value in zip(inputs, op.args, strict=True)}
        try:
            op.structure, outputs = flatten(result, plain=True)
            op.results = [known.get(id(tensor)) or self.value_of(tensor, hidden=True) for tensor in outputs]
            op.kind = CallKind.TENSOR if outputs else CallKind.VALUE
            self.note_chosen(op)
        except UnknownHolder as error:
            op.trouble = str(error)
        self.stack[-1].items.append(op)
        return op


def _all_in(made: list[Storage], handed: list[Storage]) -> bool:
    return bool(made) and all(storage in handed for storage in made)


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """What the schema of an operation says; looking it up takes longer than many kernels.

    ``written``: the place of each argument that it writes, and whether it is overwritten without being read;
    ``writes_first``: that is the first argument only; ``writes_no_data``: it writes a tensor's metadata; ``regular``:
    what it reads, writes and creates depends only on the forms of its arguments.
    """

    func: Any
    may_draw: bool
    form_only: bool
    shape_from_data: bool
    foreign: bool
    indexes: bool
    names: tuple[str, ...]
    written: tuple[tuple[int, bool], ...]
    writes_first: bool
    writes_no_data: bool
    regular: bool


_known: dict[int, KernelFacts] = {}


def facts_of(func: Any) -> KernelFacts:
    facts = _known.get(id(func))
    if facts is None:
        # the function is kept, so that its id stays its own
        facts = _known[id(func)] = _looked_up(func)
    return facts


def _looked_up(func: Any) -> KernelFacts:
    schema = func._schema
    written = tuple(
        (place, schema.name in OVERWRITES or bool(argument.kwarg_only))
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    foreign, indexes, shaped = is_foreign(func), schema.name in INDEXES, shape_from_data(func)
    may_draw = torch.Tag.nondeterministic_seeded in func.tags
    from_data = torch.Tag.data_dependent_output in func.tags
    return KernelFacts(
        func,
        may_draw,
        schema.name in FORM_ONLY,
        shaped,
        foreign,
        indexes,
        tuple(argument.name for argument in schema.arguments),
        written,
        [place for place, _ in written] == [0],
        # it changes no data, and models detach their weights
        schema.name == "aten::detach_",
        not (may_draw or shaped or foreign or indexes or from_data),
    )


def written_and_unread(facts: KernelFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Set[int], Set[int]]:
    """Return the tensors that an operation writes, by identity, and those among them that it does not read."""
    if len(facts.written) == 1:
        place, overwritten = facts.written[0]
        if not overwritten and place < len(args) and isinstance(args[place], torch.Tensor):
            return {id(args[place])}, _NONE
    written: set[int] = set()
    unread: set[int] = set()
    values = [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(facts.names)]
    for place, overwritten in facts.written:
        found = {id(tensor) for tensor in arguments_of((values[place],), {})}
        written |= found
        if overwritten:
            unread |= found
            values[place] = None
    # out= may name a tensor that is an argument, too
    return written, unread - {id(tensor) for tensor in arguments_of(tuple(values), {})}


def _random_state(func: Any, kwargs: dict[str, Any], tensors: Any) -> torch.Tensor:
    """Return the state of the generator that an operation would draw from: its argument, or its device's."""
    generator = kwargs.get("generator")
    if generator is not None:
        return generator.get_state().clone()  # type: ignore[no-any-return]
    away = next((one.device for one in arguments_of((tensors,), {}) if not devices.is_host(one.device)), None)
    return devices.rng_state(away)
