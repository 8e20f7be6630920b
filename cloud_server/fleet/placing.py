"""Which model on which devices: on each of the server's, or on those that its entry names."""

from __future__ import annotations

import torch

from cloud_server.entries import ModelEntry
from shared_hooks.errors import SpecError
from shared_hooks.models import pick_device
from shared_hooks.profiling.kind import kind


def devices_of(text: str) -> list[torch.device]:
    """Those that ``text`` lists, such as "cuda:0,cuda:1"; one that is named twice has two of each model. Raises
    SpecError.
    """
    return [pick_device(name.strip()) for name in text.split(",")]


def placed(entry: ModelEntry, server: str) -> list[torch.device]:
    """Where a model is, on a server whose devices are ``server``. Raises SpecError, also for devices that are not
    alike: what a request is answered with would hang on where it came to.
    """
    found = devices_of(entry.device or server)
    kinds = sorted({kind(device)["kind"] for device in found})
    if len(kinds) > 1:
        raise SpecError(
            f"{entry.spec.origin}: {entry.spec.model_id}: device: one model on {' and '.join(kinds)} would answer with "
            "other last bits from request to request; name devices of one kind"
        )
    return found
