"""The engine of this process: a torch model with its hooks."""

from __future__ import annotations

import platform
import time

import torch

from cloud_server.config import ModelEntry
from cloud_server.engine import Computed, Identity
from shared_hooks import EarlyOutput, Parcel, Plan, Recipe, WrappedModel
from shared_hooks.errors import BadFrame, Disagreement, IsthmusError, ModelFailed, UnknownLayer
from shared_hooks.operations import Kind
from shared_hooks.parcel import read_header


class ServedModel:
    """Implements `cloud_server.engine.Engine`: builds the model of an entry, plans its example, runs its tails."""

    def __init__(self, entry: ModelEntry, device: torch.device) -> None:
        """Raises SpecError when the model cannot be built, and ModelFailed when it cannot run its own example."""
        self._device = device
        self._wrapped = WrappedModel(entry.spec.load_model(device), depth=entry.depth)
        self._plan = self._plan_example(entry)
        # Only a model that reads values from its data can take more than one path.
        self._branches = self._plan is not None and any(op.kind is Kind.VALUE for op in self._plan.trace.ops)
        self.identity = Identity(
            model_id=entry.spec.model_id,
            weights_hash=self._wrapped.weights_hash(),
            structure_digest=self._wrapped.structure_digest(),
            plan_digest=self._plan.digest if self._plan else "",
            environment=self._wrapped.environment(),
            about=about(device),
            layers=len(self._plan.layers) if self._plan else 0,
        )

    def _plan_example(self, entry: ModelEntry) -> Plan | None:
        example = entry.spec.example(self._device)
        if example is None:
            return None
        args, kwargs = example
        try:
            return self._wrapped.plan(*args, **kwargs)
        except IsthmusError:
            raise
        except Exception as error:
            raise ModelFailed(
                f"{entry.spec.origin}: the model fails on its example: {type(error).__name__}: {error}"
            ) from error

    def admit(self, recipe: Recipe, header: bytes, payload_bytes: int, max_bytes: int) -> None:
        """Checks that header, recipe and plan speak of the same bytes. Raises BadFrame, TooLarge or Disagreement."""
        announced = Parcel.check_header(header, max_bytes)
        if announced != payload_bytes:
            raise BadFrame(f"a payload of {payload_bytes} bytes is announced, its header describes {announced}")
        _, sections = read_header(header)
        decoded = sum(section.raw_bytes for section in sections)
        if decoded != recipe.payload_bytes:
            raise BadFrame(f"the header describes {decoded} bytes of tensors, the recipe {recipe.payload_bytes}")
        if self._plan is not None and recipe.signature == self._plan.signature:
            self._check_plan(self._plan, recipe)

    def _check_plan(self, plan: Plan, recipe: Recipe) -> None:
        """For inputs like the example, the server knows by itself what crosses."""
        if recipe.plan_digest != plan.digest:
            if self._branches:
                return  # another path through the model, taken for this input's data: its layers are its own
            raise Disagreement(
                "plan: on inputs of these shapes the client's model ran other operations or layers than this side's, "
                "and it does not branch on data: the code differs"
            )
        cut = recipe.layer_id
        try:
            layer = plan.resolve(cut)
        except UnknownLayer as error:
            raise Disagreement(f"the recipe's cut: {error}") from error
        name = layer.name if layer else "input"
        if name != recipe.layer_name:
            raise Disagreement(f'layer {cut} is "{name}" here, and "{recipe.layer_name}" in the recipe')
        plan.cutting(cut)  # raises CutRefused where this side would not cut
        here = plan.frontier_bytes(cut)
        # A client that knows more paths through the model than this plan sends what those read, too, but never less.
        if recipe.payload_bytes < here or (recipe.payload_bytes > here and not self._branches):
            raise Disagreement(
                f"after {name} {here} bytes cross by this side's plan, {recipe.payload_bytes} by the recipe"
            )

    def compute(self, recipe: Recipe, header: bytes, payload: memoryview, want_metrics: bool) -> Computed:
        """The tail on one payload, in whose memory it may work. Raises ModelFailed with the model's error as cause."""
        started = time.perf_counter_ns()
        early = EarlyOutput.unpack(recipe, header, payload, payload.nbytes + recipe.payload_bytes, disposable=True)
        decoded = time.perf_counter_ns()
        try:
            output = self._wrapped.forward(early, start=recipe.layer_id)
            returned = time.perf_counter_ns()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # the kernels are only launched until here
        except IsthmusError:
            raise
        except Exception as error:
            raise ModelFailed(f"{type(error).__name__}: {error}") from error
        computed = time.perf_counter_ns()
        parcel = Parcel.of_value(output)
        durations = self._wrapped.durations()
        return Computed(
            header=parcel.header,
            buffers=parcel.buffers,
            nbytes=parcel.nbytes,
            decode_ns=decoded - started,
            inject_ns=durations["inject"],
            compute_ns=durations["compute"] + computed - returned,
            encode_ns=time.perf_counter_ns() - computed,
            layers=tuple(self._wrapped.get_layer_metrics()) if want_metrics else (),
        )


def about(device: torch.device) -> dict[str, str]:
    """Versions and device, for messages and logs."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{device} ({where})",
        "threads": str(torch.get_num_threads()),
    }
