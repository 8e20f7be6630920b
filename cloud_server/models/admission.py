"""Checks what a request announces without its model: before anything is allocated, and before a worker takes it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from cloud_server.models.engine import Identity
from shared_hooks import Crossing, Plan, WrappedModel, devices
from shared_hooks.batching.sizes import OtherSizes, moving_shapes, other_sizes
from shared_hooks.codecs import Bound
from shared_hooks.crossing import (
    ALIGN,
    Parcel,
    Section,
    by_parameter,
    leaves,
    named_crossing,
    read_header,
)
from shared_hooks.errors import BadFrame, CutRefused, Disagreement, InputMismatch, TooLarge
from shared_hooks.models.images import check_suffix, libraries
from shared_hooks.state import PythonState
from shared_hooks.tensors import Structure, dtype_name, flatten, unflatten

# A model's inputs and outputs by name, for clients that do not have the model.
#
# Names are the model's own: parameters of its ``forward``, keys and attributes of what it returns. A tensor within a
# list or tuple has its number after a point (``states.0``); an output without a name is ``output``. Shapes are those
# of the spec's example, with -1 for a dimension that may vary: this is tried by running the model on its example with
# that dimension doubled in all inputs that have it at the same place.


TRIALS_SECONDS = 1.0
"""No further size is tried after this time; sizes that were not tried are reported as fixed."""

Form = dict[str, Any]
"""JSON-able. ``inputs``, ``outputs``: lists of [name, dtype, shape]; ``cut``: the description of the cut "input" on the
example. Or ``refused`` alone: why the model cannot be called by names. ``tails``: by the name of a cut, ``inputs`` and
``cut`` of the tail behind it, and what crosses for other sizes (``sized``: a number of ``sizes``, and the rest of its
description); or ``refused``.
"""
ALL = "all"
"""As the only name in ``tails``: every cut."""


def form_of(
    plan: Plan, wrapped: WrappedModel, args: tuple[Any, ...], kwargs: dict[str, Any], tails: Sequence[str] = ()
) -> Form:
    """Return the form of a model's example, on which ``plan`` was made, and of the ``tails`` behind these cuts. Runs
    the model.

    Raises UnknownLayer for a cut that does not exist.
    """
    form = _form_of(plan, wrapped.model, args, kwargs)
    if not tails:
        return form
    if "refused" in form:
        raise CutRefused(f"tails: the model's inputs have no names: {form['refused']}")
    if tuple(tails) == (ALL,):
        names = [one.name for one in plan.cuts if one.can_split]
    else:
        found = [plan.resolve(name) for name in tails]
        names = ["input" if one is None else one.name for one in found]
    inputs = [name for name, _, _ in form["inputs"]]
    sizes = [*other_sizes(wrapped, *flatten((args, kwargs)))]
    made = {name: _tail_form(plan, name, inputs, sizes, refuses=tails[0] == ALL) for name in names}
    return {**form, "tails": made, "sizes": [one.described() for one in sizes]}


def _tail_form(plan: Plan, name: str, inputs: Sequence[str], sizes: Sequence[OtherSizes], *, refuses: bool) -> Form:
    """Return the form of the tail behind a cut. Raises CutRefused, unless ``refuses`` is set: then its entry
    says so.
    """
    try:
        crossing = plan.cutting(name)[1]
        named = named_crossing(crossing, inputs)
        forms, sized = named.to_json(), []
        for number, one in enumerate(sizes):
            with suppress(CutRefused):
                shapes = moving_shapes(one.crossing(name), inputs)
                sized.append([number, one.cut_described(name)])
                for (*_, shape), moving in zip(forms, shapes, strict=True):
                    shape[:] = [-1 if -1 in pair else pair[0] for pair in zip(shape, moving, strict=True)]
        return {"inputs": forms, "cut": crossing.to_bytes().decode(), "sized": sized}
    except CutRefused as error:
        if refuses:
            return {"refused": str(error)}
        raise


def _form_of(plan: Plan, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
    try:
        crossing = plan.cutting("input")[1]
        structure, tensors = flatten((args, kwargs))
        names = dict(leaves(by_parameter(model, structure), ""))
        if [node[1] for node in names.values() if node[0] == "t"] != list(range(len(tensors))):
            raise InputMismatch("two of the inputs of its example are one tensor, or have one name")
        shapes, outputs = _tried(model, structure, tensors)
    except (CutRefused, InputMismatch) as error:
        return {"refused": str(error)}
    # a model's own code may raise anything; clients that bring a plan are served all the same
    except Exception as error:
        return {"refused": f"it fails on its example, beside its plan: {type(error).__name__}: {error}"}
    named = [name for name, node in names.items() if node[0] == "t"]
    inputs = [[name, dtype_name(one.dtype), shape] for name, one, shape in zip(named, tensors, shapes, strict=True)]
    return {"inputs": inputs, "outputs": outputs, "cut": crossing.to_bytes().decode()}


def _tried(model: nn.Module, structure: Structure, tensors: list[torch.Tensor]) -> tuple[list[Any], list[list[Any]]]:
    """Return the inputs' shapes, and the outputs' names, dtypes and shapes, with -1 where a size was seen to
    be free.
    """
    began, state = time.monotonic(), PythonState(model)
    try:
        with buffers_kept(model), torch.no_grad(), devices.forked():
            outputs, results = _run(model, structure, tensors)
            shapes, given = [list(one.shape) for one in tensors], [list(one.shape) for one in results]
            for dim, size in sorted({(dim, size) for one in tensors for dim, size in enumerate(one.shape) if size}):
                if time.monotonic() - began > TRIALS_SECONDS:
                    break
                chosen = [n for n, one in enumerate(tensors) if one.dim() > dim and one.shape[dim] == size]
                wider = [torch.cat([one, one], dim) if n in chosen else one for n, one in enumerate(tensors)]
                try:
                    again, found = _run(model, structure, wider)
                except Exception:  # a model may raise anything for a size that it does not accept
                    continue
                finally:
                    state.restore()
                if again != outputs or any(a.dim() != b.dim() for a, b in zip(results, found, strict=True)):
                    continue  # other outputs: the request differs
                for n in chosen:
                    shapes[n][dim] = -1
                for n, one in enumerate(found):
                    given[n] = [
                        -1 if a != b else kept for a, b, kept in zip(one.shape, results[n].shape, given[n], strict=True)
                    ]
    finally:
        state.restore()
    named = [(name, node[1]) for name, node in leaves(outputs) if node[0] == "t"]
    return shapes, [[name, dtype_name(results[n].dtype), given[n]] for name, n in named]


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers after the block, because the other side runs it a different number of times."""
    before = [(one, one._version, one.detach().clone()) for one in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for one, version, kept in before:
                if one._version != version:
                    one.copy_(kept)


def _run(model: nn.Module, structure: Structure, tensors: list[torch.Tensor]) -> tuple[Structure, list[torch.Tensor]]:
    """Return the outputs on copies of these tensors, because a model may write to its inputs."""
    args, kwargs = unflatten(structure, [one.clone() for one in tensors])
    return flatten(model(*args, **kwargs))


MAX_SECTION_BYTES = 2 << 10
"""Maximum bytes of a header per tensor: reading a header delays all requests."""
MAX_VALUES_BYTES = 1 << 20
"""Most bytes of the rest of a header: where slots begin, and values that were read from data."""
MAX_LISTS = 32_768
"""Most lists in these values: a MiB of empty lists takes a hundred times as long to read as a MiB of numbers."""
SECTION_LISTS = 8
MAX_STATE_BYTES = 64 << 10
"""Most bytes of a random number generator's state; in JSON it takes a tenth."""


def check_frontier(crossing: Crossing, header: bytes, payload_bytes: int, max_bytes: int) -> None:
    """Check that header and cut agree on the payload's bytes. Raises BadFrame or TooLarge."""
    pieces = len(crossing.grains)
    tensors = pieces + len(crossing.generators)
    longest = MAX_VALUES_BYTES + tensors * MAX_SECTION_BYTES
    if len(header) > longest:
        raise TooLarge(f"a header of {len(header)} bytes for {tensors} tensors; at most {longest} are taken")
    lists = header.count(b"[") + header.count(b"{")
    if lists > MAX_LISTS + tensors * SECTION_LISTS:
        raise TooLarge(f"a header with {lists} lists; at most {MAX_LISTS} and {SECTION_LISTS} a tensor are taken")
    sections = _sections(header, payload_bytes, max_bytes, crossing.bound)
    states = sum([section.raw_bytes for section in sections[pieces:]])
    if states > len(crossing.generators) * MAX_STATE_BYTES:
        raise TooLarge(f"{states} bytes of generators' states; at most {MAX_STATE_BYTES} each are taken")
    decoded = sum([section.raw_bytes for section in sections[:pieces]])
    if decoded != crossing.payload_bytes:
        raise BadFrame(f"the header describes {decoded} bytes of tensors, the cut {crossing.payload_bytes}")


def check_open(crossing: Crossing, header: bytes, most_bytes: int) -> None:
    """Check that there is room for the cut of a request whose header is still to come. Raises BadFrame, TooLarge."""
    if header:
        raise BadFrame("a request that is open has no header yet")
    states = len(crossing.generators)
    tensors = states + len(crossing.grains)
    room = crossing.payload_bytes + states * MAX_STATE_BYTES + 2 * ALIGN * tensors
    if not 0 < most_bytes <= room:
        raise TooLarge(f"an open request of up to {most_bytes} bytes at a cut that takes {room} at most")


def check_step(header: bytes, payload_bytes: int, max_bytes: int) -> None:
    """Check that header and payload of a step agree on its bytes. Raises BadFrame or TooLarge."""
    if len(header) > MAX_VALUES_BYTES:
        raise TooLarge(f"a header of {len(header)} bytes for a step; at most {MAX_VALUES_BYTES} are taken")
    if (lists := header.count(b"[") + header.count(b"{")) > MAX_LISTS:
        raise TooLarge(f"a header with {lists} lists for a step; at most {MAX_LISTS} are taken")
    if header:
        _sections(header, payload_bytes, max_bytes)
    elif payload_bytes:
        raise BadFrame(f"a payload of {payload_bytes} bytes, and no header that says of what")


def check_file(
    identity: Identity, suffix: str, preprocess_digest: str, header: bytes, payload_bytes: int, max_bytes: int
) -> None:
    """Check that both sides read files alike, and that the payload is one file.

    Raises BadFrame, TooLarge, InputMismatch or Disagreement.
    """
    check_suffix(suffix)
    if len(header) > MAX_SECTION_BYTES:
        raise TooLarge(f"a header of {len(header)} bytes for a file; at most {MAX_SECTION_BYTES} are taken")
    if preprocess_digest != identity.preprocess_digest:
        raise Disagreement(
            f'preprocessing of model "{identity.model_id}": client {preprocess_digest[:80]!r}, server '
            f'"{identity.preprocess_digest}" (settings, code, or libraries; the server has {_decoders()})'
        )
    sections = _sections(header, payload_bytes, max_bytes)
    if len(sections) != 1 or sections[0].dtype is not torch.uint8 or len(sections[0].shape) != 1:
        raise BadFrame("a file comes as one tensor of bytes")


def _sections(header: bytes, payload_bytes: int, max_bytes: int, bound: Bound = ()) -> list[Section]:
    """Read what a header says of its tensors. ``bound``: as in `Parcel.tensors`."""
    _, sections = read_header(header, bound)
    announced = Parcel.bounded(sections, max_bytes)
    if announced != payload_bytes:
        raise BadFrame(f"a payload of {payload_bytes} bytes is announced, its header describes {announced}")
    return sections.each


def _decoders() -> str:
    return ", ".join(f"{name} {version}" for name, version in libraries().items())
