"""The second promise: the tail costs the tail, and a frontier holds what the tail reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared_hooks import EarlyOutput, WrappedModel
from shared_hooks.errors import IsthmusError
from shared_hooks.forward.session import Placeholder
from tests.covering import ALL
from tests.shared_hooks.cutting import case_of, head, planned, some_cuts_of, tail
from tests.zoo import CASES, Case

Signature = tuple[str, tuple[tuple[int, ...], ...]]

# What putting values in place takes: allocations, views, copies, and questions.
_FREE = """empty empty_strided empty_like new_empty new_empty_strided full zeros zero_ fill_ expand as_strided view
    _unsafe_view reshape alias detach slice select unsqueeze squeeze t transpose permute copy_ clone _to_copy lift_fresh
    lift set_ resize_ unbind split split_with_sizes chunk narrow view_as_real view_as_complex _conj _neg_view unfold
    arange scalar_tensor _local_scalar_dense is_same_size _reshape_alias reshape_as flatten unflatten expand_as
    contiguous to conj resolve_conj resolve_neg type_as diagonal view_as unsqueeze_ squeeze_ t_ transpose_"""
FREE = frozenset(_FREE.split())
# They read the form of their argument, not its values.
FORM_ONLY = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "rand_like", "randn_like"}


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in tuples, lists and dicts of an operation: ten times faster than torch's own walk."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for one in values:
            yield from tensors_in(one)
    elif isinstance(values, dict):
        yield from tensors_in(tuple(values.values()))


class Ops(TorchDispatchMode):
    """Counts the operations below torch functions; knows which of them read something that came from `inputs`."""

    def __init__(self, inputs: Any = ()) -> None:
        super().__init__()
        self.seen: list[tuple[Signature, bool]] = []
        self.inference = False
        self._alive: list[Any] = []
        self._touched: set[int] = set()
        self._touch(tree_leaves(inputs))

    def _touch(self, values: Any) -> None:
        for tensor in tensors_in(values):
            if not tensor.is_sparse and not tensor.is_mkldnn:
                storage = tensor.untyped_storage()
                self._alive.append(storage)  # or its address might be given to another
                self._touched.add(storage._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.inference |= torch.is_inference_mode_enabled()
        tensors = list(tensors_in((args, kwargs)))
        if any(type(t) is Placeholder or t.is_meta for t in (*tensors, *tensors_in(out))):
            return out  # nothing is computed
        depends = any(not t.is_sparse and t.untyped_storage()._cdata in self._touched for t in tensors)
        depends |= any(t.is_sparse for t in tensors)
        name = func._schema.name.split("::")[1]
        depends &= name not in FORM_ONLY
        if depends:
            self._touch(out)
            if func._schema.is_mutable:
                self._touch((args, kwargs))
        if name not in FREE:
            self.seen.append(((name, tuple(tuple(t.shape) for t in tensors)), depends))
        return out


class Reference:
    """One run of the unwrapped model: what runs after each cut, and before it what does not depend on the inputs."""

    def __init__(self, case: Case, inference: bool) -> None:
        model, (args, kwargs) = case.build(), case.inputs()
        names = {module: name for name, module in model.named_modules()}
        self._boundaries: dict[str, int] = {}
        ops, calls = Ops((args, kwargs)), Counter[str]()

        def count(module: nn.Module, args: Any, output: Any) -> None:
            if module in names:
                name = names[module] or "(model)"
                calls[name] += 1
                self._boundaries[f"{name}#{calls[name]}"] = len(ops.seen)

        mode = torch.inference_mode() if inference else torch.no_grad()
        with mode, case.setting(), case.reference_setting():
            handle = register_module_forward_hook(count)
            try:
                with ops:
                    model(*args, **kwargs)
            finally:
                handle.remove()
        self._seen = ops.seen

    def __call__(self, layer: str) -> tuple[Counter[Signature], Counter[Signature]]:
        # a forward that is called directly is no call of a module: all of it counts as after the cut
        boundary = self._boundaries.get(layer if "#" in layer else f"{layer}#1", 0)
        free = Counter(signature for signature, depends in self._seen[:boundary] if not depends)
        return Counter(signature for signature, _ in self._seen[boundary:]), free


# Hooks of unseen modules, or modules that are not addressable by their path: the reference run cannot place the cut.
UNPLACED = {
    "patched_instance_forward", "attribute_named_like_methods", "vmapped", "gradient_inside_forward", "checkpoint",
    "shared_random_generator", "catches_everything", "threads_inside", "scripted_submodule",
    "inference_mode_inside", "exact_type_checks",
}  # fmt: skip


@pytest.mark.parametrize("case", [c for c in CASES if c.name not in UNPLACED], ids=lambda case: case.name)
def test_the_tail_runs_the_tails_operations_only(case: Case) -> None:
    edge, cloud = planned(case), WrappedModel(case.build())
    names = {layer.layer_id: layer.name for layer in edge.layers}
    failures, references = [], dict[bool, Reference]()
    constants = _of_constants(case)
    for cut in some_cuts_of(edge, case, most=6):
        early = head(edge, case, cut, case.inputs())
        rehearsed, ops = Ops(), Ops()
        try:
            with rehearsed:  # works out what to do, on placeholders, and then does it
                tail(cloud, case, cut, early)
        except IsthmusError:
            assert case.loud
            continue
        with ops:
            tail(cloud, case, cut, early)
        if ops.inference not in references:
            references[ops.inference] = Reference(case, ops.inference)
        after, constant = references[ops.inference](names.get(cut, "input"))  # type: ignore[call-overload]
        after += _checks(early)
        extra = Counter(signature for signature, _ in ops.seen) - after - constant
        more = Counter(signature for signature, _ in rehearsed.seen) - after - constant - constants
        more = Counter({one: n for one, n in more.items() if not any(0 in shape for shape in one[1])})
        if extra or more:
            failures.append(f"cut {cut} {names.get(cut)}: {dict(extra)}; rehearsed: {dict(more)}")  # type: ignore[call-overload]
    assert not failures, "\n".join(failures)


def _of_constants(case: Case) -> Counter[Signature]:
    """What a rehearsal may compute: all that depends on no input, after the cut, too, as often as it likes to look."""
    model, (args, kwargs) = case.build(), case.inputs()
    ops = Ops((args, kwargs))
    with torch.no_grad(), case.setting(), case.reference_setting(), ops:
        model(*args, **kwargs)
    looks = [signature for signature, depends in ops.seen if not depends or signature[0] in LOOKS]
    looks.append(("item", ((),)))
    # draws are made, too, and the generator compared
    generator = ("equal", ((5056,), (5056,)))
    return Counter({**dict.fromkeys(looks, 1000), generator: 1_000})


LOOKS = {
    "bernoulli_",
    "rand",
    "randn",
    "_record_function_enter_new",
    "_record_function_exit",
    "zeros_like",
    "ones_like",
}


def _checks(early: EarlyOutput) -> Counter[Signature]:
    """What arrives as truth values is looked at: each is 0 or 1."""
    slots = early.crossing.slots
    truths = {mark.slot for mark in early.crossing.marks if mark.dtype is torch.bool}
    truths |= {number for number, slot in enumerate(slots) if slot.dtype is torch.bool}
    return Counter(("max", ((slots[number].storage_bytes,),)) for number in truths)


F32 = 4
# case, cut, bytes of the frontier: the least the tail can do with, counted by hand
SIZES = [
    ("plain_chain", "input", 2 * 3 * 16 * 16 * F32),
    ("plain_chain", "2", 2 * 4 * 7 * 7 * F32),
    ("residual", "blocks.0.conv1", 2 * (2 * 4 * 7 * 7) * F32),
    ("residual", "blocks.0.conv2", 2 * (2 * 4 * 7 * 7) * F32),
    ("unet_skips", "middle", (2 * 4 * 256 + 2 * 6 * 64 + 2 * 6 * 16) * F32),
    ("dense_concatenation", "layers.1", (3 + 2 + 2) * 2 * 256 * F32),
    ("parallel_branches", "one", (4 + 2) * 2 * 256 * F32),
    ("several_inputs_some_read_late", "a", (16 + 8 + 16) * F32),
    ("several_inputs_some_read_late", "b", (16 + 16) * F32),
    ("several_inputs_some_read_late", "c", (16 + 16) * F32),
    ("keyword_only_inputs", "a", 16 * F32 + 16),
    ("slice_skip", "mid", (2 * 2 * 196 + 2 * 2 * 196) * F32),
    ("slice_taken_early", "mid", (2 * 4 + 2 * 4) * F32),
    ("slice_taken_early", "wide", 2 * 64 * F32),
    ("global_residual", "b", (16 + 16) * F32),
    ("unused_input", "input", 16 * F32),
    ("unused_input", "a", 16 * F32),
    ("shape_only_input", "b", 16 * F32),
    ("dead_values", "unused", (16 + 128) * F32),
    ("positions_from_shapes", "words", 2 * 6 * 8 * F32),
    ("positions_from_shapes", "places", 2 * 6 * 8 * F32),
    ("positions_from_shapes", "mix", 2 * (2 * 6 * 8) * F32),
    ("rotary_embeddings", "layers.0.q", 2 * (2 * 5 * 8) * F32),
    ("weights_added_in_forward", "base", 16 * F32),
    ("tied_weights", "embed", 2 * 6 * 8 * F32),
    ("base_and_view_cross_then_write", "b", (16 + 16) * F32),
    ("dict_inputs", "input", (16 + 16) * F32),
    ("constant_output", "b", 0),
    ("constant_output", "a", 16 * F32),
    ("returns_view_of_input", "b", (16 + 4) * F32),
    ("aliased_outputs", "b", (16 + 16) * F32),
    ("expanded_view_crosses", "b", (8 + 8 + 16) * F32),
    ("expanded_input", "input", 8 * F32),
]


@pytest.mark.parametrize(("name", "cut", "size"), SIZES, ids=[f"{name}-{cut}" for name, cut, _ in SIZES])
def test_frontiers_hold_what_the_tail_reads(name: str, cut: str, size: int) -> None:
    case = case_of(name)
    edge = planned(case)
    args, kwargs = case.inputs()
    early = edge.forward(*args, end=cut, **kwargs)
    assert early.nbytes == edge.plan(*case.inputs()[0], **case.inputs()[1]).frontier_bytes(cut)
    assert early.nbytes == size


@pytest.mark.parametrize("case", CASES if ALL else CASES[1::2], ids=lambda case: case.name)
def test_announced_sizes_are_the_sizes_sent(case: Case) -> None:
    edge = planned(case)
    chosen = set(some_cuts_of(edge, case))
    for layer in edge.layers:
        if layer.layer_id in chosen:
            args, kwargs = case.inputs()
            with case.setting():
                early = edge.forward(*args, end=layer.layer_id, **kwargs)
            parcel = early.pack()
            payload = sum(memoryview(buffer).nbytes for buffer in parcel.buffers)
            states = sum(state.nbytes for state in early.generators)
            assert layer.frontier_bytes == early.nbytes == early.crossing.payload_bytes
            assert payload == parcel.nbytes
            assert 0 <= parcel.nbytes - early.nbytes - states < 64 * max(1, len(parcel.buffers)), "padding only"
