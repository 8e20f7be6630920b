"""What the kernels of a recorded run read, overwrite and write: the level below torch functions."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch

from shared_hooks.carried import live_at_start
from shared_hooks.escapes import bits_of
from shared_hooks.foresight import Foresight
from shared_hooks.ledger import Ledger
from shared_hooks.operations import FORM_ONLY, OVERWRITES, Kind, arguments_of, by_truth, is_foreign, shape_from_data
from shared_hooks.trace import Event, Op, Span, Storage
from shared_hooks.trees import UnknownHolder, flatten

_NONE: Set[int] = frozenset()
# an indexing of more rows counts as reading everything
MAX_ROWS = 512
INDEXES = ("aten::index_select", "aten::index")


class KernelLog(Ledger):
    """A ledger that also keeps the data events, and what follows from them: what depends on the inputs."""

    def __init__(self, existing: list[torch.Tensor]) -> None:
        super().__init__(existing)
        self.in_opaque = 0
        self.events: list[Event] = []
        self.dynamic: list[int] = []
        self.draws: list[int] = []
        self.foresight = Foresight()
        self.dice: dict[str, list[tuple[int, int]]] = {}
        self.generators: list[torch.Generator] = []
        self.doubtful = False
        self.undeclared: set[Storage] = set()
        self.scratch: set[Storage] = set()
        """Of the model's own storages, those that are rewritten before they are read; known at the end."""

    def addresses(self, storages: set[Storage]) -> set[int]:
        """What tells storages of the model's own apart for as long as it keeps them."""
        return {address for address, storage in self.storages.items() if storage in storages}

    def not_written(self, addresses: set[int]) -> list[str]:
        """Names of those among these storages of the model's own that this run has not written to."""
        written = {storage for event in self.events for storage in event.writes}
        storages = [self.storages.get(address) for address in addresses]
        lost = {"memory that it no longer has" for storage in storages if storage is None}
        return sorted(lost | {self.named(storage) for storage in storages if storage and storage not in written})

    def named(self, storage: Storage) -> str:
        """Where the model keeps a storage."""
        return storage.name

    def reads_first(self, addresses: set[int]) -> bool:
        """Whether this run reads any of these storages before it overwrites them."""
        storages = [self.storages[address] for address in addresses if address in self.storages]
        return any(live_at_start(storage, self.events) for storage in storages)

    def kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operation of the dispatcher: which storages it reads and writes."""
        seq = self.tick()
        facts = facts_of(func)
        inputs = arguments_of(args, kwargs)
        spans = [self.span(tensor) for tensor in inputs]
        handed = [storage for storage, _ in spans]
        before = _random_state(func, kwargs, inputs) if facts.may_draw else None
        bits = [bits_of(tensor) for tensor in inputs] if facts.foreign else []
        result = func(*args, **kwargs)
        outputs = [result] if type(result) is torch.Tensor else arguments_of((result,), {})
        chosen = self._takes_chosen(inputs)
        ghostly = chosen
        for storage in handed:
            ghostly |= storage.tainted <= seq
        foreseen = self.foresight.question(func, args, kwargs, outputs) if ghostly else None
        written, unread = written_by(facts, args, kwargs) if facts.written else (_NONE, _NONE)
        for tensor, (storage, _), was in zip(inputs, spans, bits, strict=False):
            # somebody else's operation may write to more than it declares
            self.doubtful |= storage.outside
            if id(tensor) not in written and bits_of(tensor) != was:
                written = {*written, id(tensor)}
                self.undeclared |= {storage} if storage.outside else set()
        made = [self.storage_of(tensor, created=seq) for tensor in outputs]
        is_view = bool(made) and not written and all(storage in handed for storage in made)
        reads: list[Span] = []
        if not is_view and not facts.form_only:
            reads = spans
            if unread:
                reads = [span for tensor, span in zip(inputs, spans, strict=True) if id(tensor) not in unread]
            rows = self._rows(func, args) if facts.indexes else None
            if rows is not None:
                reads = [*rows, *(span for tensor, span in zip(inputs, spans, strict=True) if tensor is not args[0])]
        draws = before is not None and not torch.equal(before, _random_state(func, kwargs, result))
        reads_tainted = chosen and bool(reads)
        for storage, _ in reads:
            reads_tainted |= storage.tainted <= seq
        writes: list[Storage] = []
        overwrites: list[Span] = []
        if written:
            writes = [span[0] for tensor, span in zip(inputs, spans, strict=True) if id(tensor) in written]
            overwrites = [span for tensor, span in zip(inputs, spans, strict=True) if id(tensor) in unread]
        if reads_tainted or draws:
            for storage in [*writes, *(storage for storage in made if storage.created == seq)]:
                storage.tainted = min(storage.tainted, seq)
                storage.born_tainted |= storage.created == seq
        self.events.append(Event(seq, reads, overwrites, writes, handed))
        op = self.op or self._unseen(func, inputs, result)
        if op is not None:
            op.reads_tainted |= reads_tainted
            if foreseen is not None:
                op.unasked.append(foreseen)
            op.draws |= draws
        if draws:
            self.draws.append(seq)
            self._note_draw(kwargs.get("generator"), [*inputs, *outputs])
        if op is not None:
            op.writes += writes
        shaped = facts.shape_from_data and (not facts.indexes or by_truth(args))
        if reads_tainted and (shaped or (facts.foreign and foreseen is not None and not foreseen())):
            self.note_dynamic(op)
        if writes:
            self._note_memory(
                op, [entry for entry in zip(inputs, spans, strict=True) if id(entry[0]) in written], reads_tainted
            )
            if func._schema.name == "aten::detach_":
                writes.clear()  # it changes no data, and models detach their weights
        return result

    def _takes_chosen(self, inputs: list[torch.Tensor]) -> bool:
        """Whether an argument is a view that data has chosen: what is computed from it hangs on the inputs."""
        if self.op is not None:
            return self.op.takes_chosen
        known = (self.value_by_id.get(id(tensor)) for tensor in inputs)
        return any(entry is not None and entry[1].chosen for entry in known)

    def note_chosen(self, op: Op) -> None:
        """Results that are views of what hangs on no input, where data says of what: a row of a table, say."""
        if op.takes_chosen or (op.dynamic and op.reads_tainted):
            for value in op.results:
                value.chosen |= value not in op.args and not value.hangs(self.seq)

    def _rows(self, func: Any, args: tuple[Any, ...]) -> list[Span] | None:
        """What of its first argument an indexing reads, where the index is a constant; None where that is not known."""
        name = func._schema.name
        if self.dynamic:
            return None  # an index that Python made after it had read data may be made from the data
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
        """What the model does from here on may depend on the data."""
        self.dynamic.append(self.seq)
        if op is not None:
            op.dynamic = True

    def _note_memory(self, op: Op | None, written: list[tuple[torch.Tensor, Span]], tainted: bool) -> None:
        """A tensor that is written in place may get other memory (``set_``), or more of it (``resize_``, ``out=``)."""
        for tensor, (storage, _) in written:
            if storage.opaque:
                continue
            now = self.storage_of(tensor, created=self.seq)
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
        """An operation that no torch function call of the model's Python stands for."""
        if self.in_opaque:
            return None
        op = Op(self.seq, str(func), [self.value_of(tensor) for tensor in inputs], hidden=True, end=self.seq)
        op.args_tainted = any(value.hangs(op.seq) for value in op.args)
        op.takes_chosen = any(value.chosen for value in op.args)
        for value in op.args:
            value.last_use = op.seq
        known = {id(tensor): value for tensor, value in zip(inputs, op.args, strict=True)}
        try:
            op.structure, outputs = flatten(result, plain=True)
            op.results = [known.get(id(tensor)) or self.value_of(tensor, hidden=True) for tensor in outputs]
            op.kind = Kind.TENSOR if outputs else Kind.VALUE
            self.note_chosen(op)
        except UnknownHolder as error:
            op.trouble = str(error)
        self.stack[-1].items.append(op)
        return op


@dataclass(frozen=True, slots=True)
class _Facts:
    """What an operation of the dispatcher says of itself; looking it up takes longer than many a kernel.

    ``written``: the place of each argument that it writes, and whether it is overwritten without being read.
    """

    func: Any
    may_draw: bool
    form_only: bool
    shape_from_data: bool
    foreign: bool
    indexes: bool
    names: tuple[str, ...]
    written: tuple[tuple[int, bool], ...]


_known: dict[int, _Facts] = {}


def facts_of(func: Any) -> _Facts:
    facts = _known.get(id(func))
    if facts is None:
        schema = func._schema
        written = tuple(
            (place, schema.name in OVERWRITES or bool(argument.kwarg_only))
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        foreign = is_foreign(func)
        may_draw = torch.Tag.nondeterministic_seeded in func.tags
        names = tuple(argument.name for argument in schema.arguments)
        # the function is kept, so that its id stays its own
        form_only = schema.name in FORM_ONLY
        facts = _known[id(func)] = _Facts(
            func, may_draw, form_only, shape_from_data(func), foreign, schema.name in INDEXES, names, written
        )
    return facts


def written_by(facts: _Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Set[int], Set[int]]:
    """Identities of the tensors an operation writes, and of those among them that it does not read."""
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
    """The state of the generator an operation would draw from: the one it is given, or its device's."""
    generator = kwargs.get("generator")
    if generator is not None:
        return generator.get_state().clone()  # type: ignore[no-any-return]
    if any(tensor.is_cuda for tensor in arguments_of((tensors,), {})):
        return torch.cuda.get_rng_state()
    return torch.get_rng_state()
