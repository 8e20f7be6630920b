"""What the kernels of a recorded run read, overwrite and write: the level below torch functions."""

from __future__ import annotations

from typing import Any

import torch

from shared_hooks.ledger import Ledger
from shared_hooks.operations import FORM_ONLY, OVERWRITES, Kind, arguments_of
from shared_hooks.trace import Event, Op, Storage
from shared_hooks.trees import UnknownHolder, flatten


class KernelLog(Ledger):
    """A ledger that also keeps the data events, and what follows from them: what depends on the inputs."""

    def __init__(self, existing: list[torch.Tensor]) -> None:
        super().__init__(existing)
        self.in_opaque = 0
        self.events: list[Event] = []
        self.dynamic: list[int] = []
        self.draws: list[int] = []

    def kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operation of the dispatcher: which storages it reads and writes."""
        seq = self.tick()
        inputs = arguments_of(args, kwargs)
        spans = [self.span(tensor) for tensor in inputs]
        known = {storage.index for storage, _ in spans}
        may_draw = torch.Tag.nondeterministic_seeded in func.tags
        before = _random_state(func, kwargs, inputs) if may_draw else None
        result = func(*args, **kwargs)
        outputs = arguments_of((result,), {})
        written, unread = written_by(func, args, kwargs)
        made = [self.storage_of(tensor, created=seq) for tensor in outputs]
        is_view = bool(made) and not written and all(storage.index in known for storage in made)
        reads = []
        if not is_view and func._schema.name not in FORM_ONLY:
            reads = [span for tensor, span in zip(inputs, spans, strict=True) if id(tensor) not in unread]
        draws = before is not None and not torch.equal(before, _random_state(func, kwargs, result))
        reads_tainted = any(storage.tainted <= seq for storage, _ in reads)
        writes = [span[0] for tensor, span in zip(inputs, spans, strict=True) if id(tensor) in written]
        if reads_tainted or draws:
            for storage in [*writes, *(storage for storage in made if storage.created == seq)]:
                storage.tainted = min(storage.tainted, seq)
                storage.born_tainted |= storage.created == seq
        overwrites = [span for tensor, span in zip(inputs, spans, strict=True) if id(tensor) in unread]
        self.events.append(Event(seq, reads, overwrites, writes, [storage for storage, _ in spans]))
        op = self.op or self._unseen(func, inputs, result)
        if op is not None:
            op.reads_tainted |= reads_tainted
            op.draws |= draws
        if draws:
            self.draws.append(seq)
        if op is not None:
            op.writes += writes
        shape_from_data = (
            torch.Tag.dynamic_output_shape in func.tags or func._schema.name == "aten::_local_scalar_dense"
        )
        if reads_tainted and shape_from_data:
            self.dynamic.append(seq)
            if op is not None:
                op.dynamic = True
            for call in self.stack:
                call.reads_values = True
        self._note_writes(writes)
        return result

    def _unseen(self, func: Any, inputs: list[torch.Tensor], result: Any) -> Op | None:
        """An operation that no torch function call of the model's Python stands for."""
        if self.in_opaque:
            return None
        op = Op(self.seq, str(func), [self.value_of(tensor) for tensor in inputs], hidden=True, end=self.seq)
        op.args_tainted = any(value.storage.tainted <= op.seq for value in op.args)
        for value in op.args:
            value.last_use = op.seq
        known = {id(tensor): value for tensor, value in zip(inputs, op.args, strict=True)}
        try:
            op.structure, outputs = flatten(result, plain=True)
            op.results = [known.get(id(tensor)) or self.value_of(tensor, hidden=True) for tensor in outputs]
            op.kind = Kind.TENSOR if outputs else Kind.VALUE
        except UnknownHolder as error:
            op.trouble = str(error)
        self.stack[-1].items.append(op)
        return op

    def _note_writes(self, writes: list[Storage]) -> None:
        for storage in writes:
            if storage.born_tainted:
                continue
            for call in self.stack:
                if storage.created < call.enter:
                    call.keep = call.keep or "it writes in place to a value made outside it"


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[set[int], set[int]]:
    """Identities of the tensors an operation writes, and of those among them that it does not read."""
    written: set[int] = set()
    unread: set[int] = set()
    arguments = func._schema.arguments
    values = [args[i] if i < len(args) else kwargs.get(argument.name) for i, argument in enumerate(arguments)]
    for number, argument in enumerate(arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        found = {id(tensor) for tensor in arguments_of((values[number],), {})}
        written |= found
        if func._schema.name in OVERWRITES or argument.kwarg_only:
            unread |= found
            values[number] = None
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
